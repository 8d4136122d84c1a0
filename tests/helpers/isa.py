"""What inductor takes for granted of the processor while tests run."""

from __future__ import annotations

__all__ = ["skip_isa_probe"]


def skip_isa_probe() -> None:
    """No trial of the instruction sets that the processor names, and none of its tiles (AMX).

    Each process that compiles would try them all: by a program that is compiled for each, and another Python that
    imports torch to load it.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import VecAMX

    config.cpp.vec_isa_ok = True
    VecAMX.__bool__ = lambda _: False  # type: ignore[method-assign]
