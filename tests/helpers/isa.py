"""Skip inductor's probes of the processor's instruction sets in tests."""

from __future__ import annotations


def skip_isa_probe() -> None:
    """Make inductor assume that the processor supports the instruction sets that it names, without AMX.

    Otherwise, each process that compiles probes all of them: it compiles a program for each one, and loads it in
    another Python process that imports torch.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import VecAMX

    config.cpp.vec_isa_ok = True
    VecAMX.__bool__ = lambda _: False  # type: ignore[method-assign]
