"""What the exit status and the output of a training process that failed say of why."""

from __future__ import annotations

import re
import signal
from pathlib import Path

__all__ = ["own_line", "ran_out_of_memory", "where"]

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # by the kernel, which has no other way to say so
_SIGNS = (
    "out of memory",  # train.py's own line, and those of torch and CUDA
    "outofmemoryerror",  # torch's class, in a traceback
    "cublas_status_alloc_failed",
)


def ran_out_of_memory(status: int, output: str) -> bool:
    """Whether memory ran out, the GPU's or the host's; a process that its caller killed is taken for one, too."""
    output = output.lower()
    return status in _KILLED or any(sign in output for sign in _SIGNS)


def own_line(output: str) -> str:
    """train.py's own line, without its name, or else the last line that says anything; empty where none does.

    The stacks that faulthandler leaves say nothing here; who called ``abort`` has said why before.
    """
    before, fatal, stacks = output.partition("Fatal Python error: ")
    kind = stacks.partition("\n")[0]
    output = before if kind == "Aborted" else before + fatal + kind
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line.partition("train.py: ")[2] for line in lines if "train.py: " in line]
    return (own or lines or [""])[-1]


def where(output: str) -> str:
    """``", at FILE:LINE in FUNCTION"``, from the main thread's stack that faulthandler left; empty where it left none.

    The innermost call is named, and the one of this package that led there.
    """
    stack = re.search(r"^Current thread .*\n((?:  File .*\n?)+)", output, re.MULTILINE)
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stack[1]) if stack else []
    if not frames:
        return ""
    own = next((frame for frame in frames if Path(__file__).parents[1] in Path(frame[0]).parents), frames[0])
    named = [f"{Path(file).name}:{line} in {function}" for file, line, function in dict.fromkeys([frames[0], own])]
    return f", at {' under '.join(named)}"
