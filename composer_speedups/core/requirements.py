"""What techniques need of the machine and the run. Each function yields a refusal, or nothing if the need is met."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run


def needs_cuda(who: str, run: Run, what: str, capability: tuple[int, int] = (0, 0)) -> Iterator[Refusal]:
    """A CUDA GPU of a minimum compute capability, such as (8, 0) for Ampere."""
    at_least = f" of compute capability {capability[0]}.{capability[1]} or newer" if any(capability) else ""
    wanted = f"a CUDA GPU{at_least}"
    if run.device.type != "cuda":
        fix = "move the model to one first, or remove the technique" if run.in_other_loop else "remove the technique"
        yield Refusal(who, f"{what} needs {wanted}, and this run is on the {run.device.type}", fix)
        return
    import torch

    have = torch.cuda.get_device_capability(run.device)
    if have < capability:
        name = torch.cuda.get_device_name(run.device)
        yield Refusal(who, f"{what} needs {wanted}, and {name} is {have[0]}.{have[1]}", "remove the technique")


def needs_package(who: str, module: str, requirement: str) -> Iterator[Refusal]:
    """An importable package, which ``requirement`` installs; ``.[NAME]`` is an extra of this package."""
    if importlib.util.find_spec(module) is None:
        where = " in a clone of composer_speedups" if requirement.startswith(".[") else ""
        yield Refusal(who, f"the package {module!r} is not installed", f"pip install {requirement!r}{where}")


def needs_apex(who: str, module: str) -> Iterator[Refusal]:
    """A module of NVIDIA Apex with its CUDA extensions; the package index has another project of that name."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ImportError:
        found = False
    if not found:
        fix = "build it from github.com/NVIDIA/apex with --cpp_ext --cuda_ext; pip's apex is another project"
        yield Refusal(who, "NVIDIA Apex is not installed with its CUDA extensions", fix)


def needs_triton(who: str) -> Iterator[Refusal]:
    """Triton, and the C compiler that it needs when a kernel is launched for the first time."""
    from composer_speedups.kernels.common import missing_c_compiler

    yield from needs_package(who, "triton", "triton")
    if (missing := missing_c_compiler()) is not None:
        yield Refusal(who, f"Triton needs a C compiler: {missing}", "install gcc, or set CC")


def needs_autocast(who: str, run: Run, what: str) -> Iterator[Refusal]:
    """Mixed precision, from the ``mixed_precision`` technique or the Trainer's precision; other loops set it later."""
    if not run.autocast and not run.in_other_loop:
        reason = f"{what} needs mixed precision, and this run is fp32"
        yield Refusal(who, reason, "add mixed_precision, or remove the technique")


def needs_bf16(who: str, run: Run, what: str) -> Iterator[Refusal]:
    """A run whose mixed precision is not fp16, which is Composer's default on a GPU."""
    if run.precision == "amp_fp16":
        fix = "add mixed_precision with dtype bf16, or set the precision to amp_bf16"
        yield Refusal(who, f"{what} needs bf16, and this run is fp16", fix)


def needs_composer(who: str, run: Run, what: str) -> Iterator[Refusal]:
    """Composer's training loop."""
    if run.in_other_loop:
        yield Refusal(who, f"{what} needs Composer's Trainer, and this is another loop", "leave it out")
