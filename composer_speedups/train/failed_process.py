"""Find the cause of a failed training process from its exit status and output."""

from __future__ import annotations

import re
import signal
from pathlib import Path

__all__ = ["crash_location", "failure_reason", "own_line", "ran_out_of_memory"]

_MAX_MESSAGE = 300  # characters of a failed process's message
_KILLED_STATUSES = (-signal.SIGKILL, 128 + signal.SIGKILL)  # sent by the kernel's out-of-memory killer
_CAUSE = re.compile(r"([A-Za-z_][\w.]*(Error|Exception)|Fatal Python error|what\(\)): ")
_OUT_OF_MEMORY = (
    "out of memory",  # train.py's own line, and those of torch and CUDA
    "outofmemoryerror",  # torch's class, in a traceback
    "cublas_status_alloc_failed",
)


def ran_out_of_memory(status: int, output: str) -> bool:
    """Whether the GPU's or the host's memory ran out. A process killed by its caller is counted too."""
    output = output.lower()
    return status in _KILLED_STATUSES or any(sign in output for sign in _OUT_OF_MEMORY)


def failure_reason(status: int, output: str) -> str:
    """Why a training process failed, in one line."""
    reason = own_line(output)[:_MAX_MESSAGE] or f"it ended with status {status}"
    return f"ran out of memory ({reason})" if ran_out_of_memory(status, output) else reason


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


def crash_location(output: str) -> str:
    """``", at FILE:LINE in FUNCTION"``, from faulthandler's stack of the main thread; empty if there is none.

    It names the innermost call, and the call of this package that led to it.
    """
    stack = re.search(r"^Current thread .*\n((?:  File .*\n?)+)", output, re.MULTILINE)
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stack[1]) if stack else []
    if not frames:
        return ""
    own = next((frame for frame in frames if Path(__file__).parents[1] in Path(frame[0]).parents), frames[0])
    named = [f"{Path(file).name}:{line} in {function}" for file, line, function in dict.fromkeys([frames[0], own])]
    return f", at {' under '.join(named)}"
