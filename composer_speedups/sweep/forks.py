"""Fork training processes from a server that has imported everything, so that they start in a fraction of a second.

Libraries that check for a GPU at import must see it, but a process that has initialized CUDA cannot be forked. The
server therefore does not initialize CUDA; if an import did, each job starts cold.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from typing import IO

from composer_speedups.core.processes import killed_with_parent, python_module_command

_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def start_server() -> socket.socket:
    """Connect to the server that has imported everything; start one if none runs. It ends with this process."""
    global _server
    if _server is None or _server[0].poll() is not None:
        ours, its = socket.socketpair()
        with its:
            command, environment = python_module_command(__name__, str(its.fileno()))
            prefix, no_input = killed_with_parent(), subprocess.DEVNULL
            fds = [its.fileno()]
            # in a session of its own, which gets no Ctrl-C
            started = [*prefix, *command]
            process = subprocess.Popen(started, stdin=no_input, env=environment, start_new_session=True, pass_fds=fds)
        ours.recv(1)  # it is ready, or has ended
        _server = process, ours
        atexit.register(_end_server)
    return _server[1]


def _end_server() -> None:
    if _server is not None:
        _server[1].close()
        _server[0].kill()  # its own end would take seconds
        _server[0].wait()


class Fork:
    """A forked process in a group of its own, with the methods of subprocess.Popen that jobs need.

    It runs a command of :func:`python_module_command`, with output and errors in ``output``.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> None:
        self.returncode: int | None = None
        readable, writable = os.pipe()
        with tempfile.TemporaryFile("w") as request, open(writable, "wb") as status:
            json.dump((list(command), dict(environment), os.getcwd()), request)
            request.seek(0)  # after it has written what is buffered
            socket.send_fds(start_server(), [b"."], [file.fileno() for file in (request, status, output)])
        self._status = open(readable, "rb", buffering=0)  # noqa: SIM115 (closed at the end of the process)
        self.pid = int(self._status.readline())

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its exit status, negative for a signal; None after ``timeout`` seconds."""
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.readline() or -signal.SIGKILL)  # with the server
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        return self.wait(0)

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def import_all() -> None:
    """Import everything that training imports later."""
    import composer_speedups.data
    import composer_speedups.tasks.export
    import composer_speedups.tasks.models
    import composer_speedups.train.application
    import composer_speedups.train.plot
    import composer_speedups.train.report
    import composer_speedups.train.trainer  # noqa: F401


def _serve(connection: socket.socket) -> tuple[list[str], dict[str, str], str] | None:
    """Fork a process for each request and return the request there; return None once the command has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Python counts the threads of native pools, which the job does not use before it has some of its own.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    connection.send(b".")
    while True:
        _, fds, *_ = socket.recv_fds(connection, 1, 3)
        if not fds:
            return None
        if not os.fork():
            break
        for fd in fds:
            os.close(fd)
    # In a child, which forks the job and reports how it ends.
    request, status, output = fds
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with_parent()
    if pid := os.fork():
        os.setpgid(pid, pid)
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    _end_with_parent()
    os.close(status)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    with open(request) as file:
        return json.load(file)  # type: ignore[no-any-return]


def _end_with_parent() -> None:
    """As :func:`killed_with_parent`, for this process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    gc.disable()
    sys.modules["torchao"] = None  # type: ignore[assignment]  # it asks for a GPU; what uses it imports it after the fork
    import_all()
    del sys.modules["torchao"]
    import torch
    from composer.utils.collect_env import get_cpu_model

    get_cpu_model()  # takes a second, and is kept
    gc.freeze()  # a collection would write to, and so copy, what the processes share
    gc.enable()
    if (request := _serve(socket.socket(fileno=int(sys.argv[1])))) is None:
        return
    command, environment, folder = request
    os.chdir(folder)
    if torch.cuda._is_in_bad_fork():
        os.execve(command[0], command, environment)
    os.environ.clear()
    os.environ.update(environment)
    program, sys.argv[1:] = command[3], command[4:]
    sys.path[:] = dict.fromkeys([*environment["PYTHONPATH"].split(os.pathsep), *sys.path])
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
