"""Start the training processes of a table ahead of their turn, so that several import at the same time.

Composer's import takes ten seconds and more, so a table takes half as long if several processes import together. No
process of a group trains before all have imported, because imports would disturb measurements. To time a whole job, a
process is started when its turn comes instead, and timed from its start to its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from composer_speedups.sweep.processes import TRAIN, Job, Process


class Held(Process):
    """A process that imports everything when it is started, and runs its job when :meth:`begin` is called."""

    def __init__(self, job: Job) -> None:
        self._ready = job.log.with_suffix(".ready")
        arguments = [str(self._ready), job.program, *job.arguments]
        super().__init__(dataclasses.replace(job, program=__name__, arguments=arguments), stdin=subprocess.PIPE)
        self.job = job

    def wait_until_ready(self) -> None:
        """Wait until it has imported everything, or has ended; then its status says why."""
        while not self._ready.exists() and self.popen.poll() is None:
            time.sleep(0.02)

    def begin(self) -> None:
        """Let it run; its duration is counted from here."""
        assert self.popen.stdin is not None
        self.began = time.perf_counter()
        with contextlib.suppress(BrokenPipeError):  # it ended
            self.popen.stdin.write(b"run\n")
            self.popen.stdin.close()

    def kill(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        super().kill()


class Ahead:
    """Starts jobs of one rank in their order, and ``count`` of them at the same time, which wait for their turn."""

    def __init__(self, jobs: Sequence[Job], count: int) -> None:
        self._jobs, self._count = deque(job for job in jobs if job.ranks == 1), count
        self._held: deque[Held] = deque()

    def __call__(self, job: Job) -> Process:
        if job.ranks > 1:
            return Process(job)
        if not self._held:
            for _ in range(min(self._count, len(self._jobs))):
                self._held.append(Held(self._jobs.popleft()))
            for held in self._held:
                held.wait_until_ready()
        held = self._held.popleft()
        held.begin()
        return held

    def close(self) -> None:
        """Kill the processes whose turn did not come."""
        for held in self._held:
            held.kill()


def compile_bytecode(programs: set[str]) -> None:
    """Import programs, and what they import, in another process, so that their bytecode is there."""
    for program in sorted(programs | {__name__}):
        code = f"import {program} as module; getattr(module, 'import_all', int)()"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""}, check=True)


def import_all() -> None:
    """Import everything that training imports later."""
    import composer_speedups.data
    import composer_speedups.tasks.export
    import composer_speedups.tasks.models
    import composer_speedups.train.plot
    import composer_speedups.train.report
    import composer_speedups.train.trainer  # noqa: F401
    from composer_speedups.train import application  # noqa: F401


def _main(ready: str, program: str, *arguments: str) -> None:
    import_all()
    from composer_speedups.train.cli import exit_codes

    Path(ready).touch()
    if not sys.stdin.readline():  # the runner has ended
        return
    with exit_codes():
        importlib.import_module(f"{TRAIN}.application" if program == TRAIN else program).main([*arguments])


if __name__ == "__main__":
    _main(*sys.argv[1:])
