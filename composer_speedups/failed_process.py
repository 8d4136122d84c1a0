"""What the exit status and the output of a training process that failed say of why."""

from __future__ import annotations

import signal

__all__ = ["own_line", "ran_out_of_memory"]

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
    """train.py's own line, without its name, or else the last line that says anything; empty where none does."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line.partition("train.py: ")[2] for line in lines if "train.py: " in line]
    return (own or lines or [""])[-1]
