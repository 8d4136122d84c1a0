"""Find the cause of a failed training process from its exit status and output."""

from __future__ import annotations

import re
import signal
from typing import Literal

__all__ = ["Failure", "failure_reason", "kind_of_failure", "own_line"]

_MAX_MESSAGE = 300  # characters of a failed process's message
_KILLED_STATUSES = (-signal.SIGKILL, 128 + signal.SIGKILL)  # sent by the kernel's out-of-memory killer
_CAUSE = re.compile(r"([A-Za-z_][\w.]*(Error|Exception)|Fatal Python error|what\(\)): ")
_OUT_OF_MEMORY = (
    "out of memory",  # train.py's own line, and those of torch and CUDA
    "outofmemoryerror",  # torch's class, in a traceback
    "cublas_status_alloc_failed",
)


Failure = Literal["out of memory", "time", "refused", "failed"]


def kind_of_failure(status: int | None, output: str) -> Failure:
    """What went wrong: the GPU's or the host's memory ran out; the process was killed at its time limit (status None);
    train.py refused a config, a package or the machine in one line; or anything else.

    A process that another one killed counts as out of memory, because the kernel does so.
    """
    if status is None:
        return "time"
    lowered = output.lower()
    if status in _KILLED_STATUSES or any(sign in lowered for sign in _OUT_OF_MEMORY):
        return "out of memory"
    return "refused" if status == 2 else "failed"


def failure_reason(status: int | None, output: str) -> str:
    """Why a training process failed, in one line."""
    kind = kind_of_failure(status, output)
    if kind == "time":
        return "it was killed at its time limit"
    reason = own_line(output)[:_MAX_MESSAGE] or f"it ended with status {status}"
    return f"ran out of memory ({reason})" if kind == "out of memory" else reason


def own_line(output: str) -> str:
    """train.py's own error line without its prefix, or else the last line that names an exception or a crash, or else
    the last nonempty line of the output; empty if there is none.

    Stacks printed by faulthandler are ignored: the caller of ``abort`` has printed the reason before them.
    """
    before, fatal, stacks = output.partition("Fatal Python error: ")
    kind = stacks.partition("\n")[0]
    output = before if kind == "Aborted" else before + fatal + kind
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line.partition("train.py: ")[2] for line in lines if "train.py: " in line]
    causes = [line for line in lines if _CAUSE.match(line)]  # torch prints advice below its exceptions
    return (own or causes or lines or [""])[-1]
