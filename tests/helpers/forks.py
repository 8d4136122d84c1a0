"""Functions in processes of their own, forked with everything imported as the jobs of tune and repeat are.

The test's own process cannot be forked: once autograd has started threads or CUDA was initialized, a child could not
train.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import dill  # functions within functions, which pickle does not take

from composer_speedups.core.processes import kill_process_group, python_module_command
from composer_speedups.sweep import forks
from tests.helpers.hangs import HANGS


class Done(NamedTuple):
    status: int  # negative for a signal's number
    stderr: str


class Fork:
    """A process that runs a copy of ``function`` in the current folder, with its output in ``<name>.err``."""

    def __init__(self, function: Callable[[], Any], name: str = "fork", **environment: str) -> None:
        self.path, pickled = Path(f"{name}.err").absolute(), Path(f"{name}.function").absolute()
        pickled.write_bytes(dill.dumps(function))
        command, own = python_module_command("tests.helpers.forks", str(pickled))
        with self.path.open("wb") as output:
            self.process = forks.Fork(command, {**own, **environment}, output)

    def wait(self) -> Done:
        """Wait for its end; kill it and raise TimeoutError if it hangs."""
        if not self.ends_within(HANGS):
            kill_process_group(self.process)
            raise TimeoutError(f"it still runs after {HANGS} s: {self.path.read_text()[-3000:]}")
        return Done(self.process.wait() or 0, self.path.read_text())

    def ends_within(self, seconds: float) -> bool:
        return self.process.wait(seconds) is not None


def skip_isa_probe() -> None:
    """Make inductor assume the instruction sets that it names, without AMX; it would compile and load a probe of each
    in every process."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import VecAMX

    config.cpp.vec_isa_ok = True
    VecAMX.__bool__ = lambda _: False  # type: ignore[method-assign]


if __name__ == "__main__":
    from composer.models import huggingface

    skip_isa_probe()
    huggingface._is_registered_causal_lm = lambda _: False  # it would import all model classes
    with patch.dict(os.environ):  # imports tests/conftest.py, which sets variables
        function = dill.loads(Path(sys.argv[1]).read_bytes())
    function()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at the interpreter's end, threads of gloo may abort the process
