"""A technique's requirements on the machine and the run, each with the fix that its error names."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from composer.core import State

from composer_speedups.core.trainer_state import device_of, world_size
from composer_speedups.kernels.compiler import missing_c_compiler

__all__ = [
    "Context",
    "Requirement",
    "needs_autocast",
    "needs_bf16",
    "needs_c_compiler",
    "needs_cpp_compiler",
    "needs_cuda",
    "needs_package",
    "needs_triton",
    "require",
    "unsuitable_device",
]


class Requirement(NamedTuple):
    met: bool
    reason: str  # why the technique cannot engage, as the end of "NAME: …"
    fix: str  # what the user can do about it


def require(requirements: Iterable[Requirement]) -> None:
    """Check requirements in a technique's function.

    Raises:
        ValueError: The first one that is not met, as "reason; fix".
    """
    for met, reason, fix in requirements:
        if not met:
            raise ValueError(f"{reason}; {fix}")


@dataclass(frozen=True)
class Context:
    """Properties of a run that are known before its model is built.

    Attributes:
        device: The rank's device.
        precision: Precision of the forward pass: ``fp32``, ``amp_bf16`` or ``amp_fp16``. It is the Trainer's, unless
            a technique sets another one (:meth:`.Technique.context_after`), which the techniques after it see.
        techniques: YAML names of the techniques that engage in this run.
        ranks: Number of processes that train together.
        microbatch_size: Samples per forward pass and device, ``"auto"``, or None for whole batches.
        sharded: Whether FSDP or tensor parallelism shards the model across ranks.
    """

    device: torch.device
    precision: str = "fp32"
    techniques: frozenset[str] = frozenset()
    ranks: int = 1
    microbatch_size: int | float | str | None = None
    sharded: bool = False

    @classmethod
    def of(cls, state: State) -> Context:
        microbatch = "auto" if state.auto_microbatching else state.device_train_microbatch_size
        return cls(
            device_of(state),
            state.precision.value,
            ranks=world_size(),
            microbatch_size=microbatch,
            sharded=state.fsdp_config is not None or state.tp_config is not None,
        )

    @property
    def autocast(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.precision != "fp32"


def needs_cuda(context: Context, what: str, capability: tuple[int, int] = (0, 0)) -> Requirement:
    """Require a CUDA GPU of a minimum compute capability, such as (8, 0) for Ampere."""
    fix = "remove the technique"
    wanted = "a CUDA GPU"
    if capability > (0, 0):
        wanted += f" of compute capability {capability[0]}.{capability[1]} or newer"
    if context.device.type != "cuda":
        return Requirement(False, f"{what} needs {wanted}, and this run is on the {context.device.type}", fix)
    have = torch.cuda.get_device_capability(context.device)
    name = torch.cuda.get_device_name(context.device)
    return Requirement(have >= capability, f"{what} needs {wanted}, and {name} is {have[0]}.{have[1]}", fix)


def unsuitable_device(device: torch.device, what: str, capability: tuple[int, int]) -> str | None:
    """Why a model on ``device`` cannot compute ``what``, for a technique's function; None if it can."""
    on_gpu = device.type == "cuda"
    if (torch.cuda.get_device_capability(device) if on_gpu else (0, 0)) >= capability:
        return None
    place = torch.cuda.get_device_name(device) if on_gpu else f"the {device.type}"
    wanted = ".".join(map(str, capability))
    return f"{what} needs a CUDA GPU of compute capability {wanted} or newer, and the model is on {place}"


def needs_package(module: str, requirement: str) -> Requirement:
    """Require an importable package, which ``requirement`` installs; ``.[NAME]`` is an extra of this package."""
    installed = importlib.util.find_spec(module) is not None
    where = " in a clone of composer_speedups" if requirement.startswith(".[") else ""
    return Requirement(installed, f"the package {module!r} is not installed", f"pip install {requirement!r}{where}")


def needs_triton() -> Iterator[Requirement]:
    """Require Triton, and the C compiler that it needs when a kernel is launched for the first time."""
    yield needs_package("triton", "triton")
    yield needs_c_compiler("Triton")


def needs_c_compiler(what: str) -> Requirement:
    """Require a C compiler that Triton finds."""
    missing = missing_c_compiler()
    return Requirement(missing is None, f"{what} needs a C compiler: {missing}", "install gcc, or set CC")


def needs_cpp_compiler(what: str, fix: str) -> Requirement:
    """Require a C++ compiler with which torch.compile can compile for a CPU."""
    from torch._inductor import config  # a slow import, which only compilation on a CPU needs

    # inductor tries $CXX, or g++ (clang++ on macOS). None stands for a download, which is off by default.
    cxx: Any = config.cpp.cxx
    compilers = [cxx] if isinstance(cxx, str) else [name for name in cxx if name is not None]
    return Requirement(
        any(map(shutil.which, compilers)), f"{what} needs the C++ compiler {' or '.join(compilers)}", fix
    )


def needs_autocast(context: Context, what: str) -> Requirement:
    """Require mixed precision, from the ``mixed_precision`` technique or the Trainer's precision."""
    return Requirement(
        context.autocast,
        f"{what} needs mixed precision, and this run is fp32",
        "add mixed_precision, or remove the technique",
    )


def needs_bf16(context: Context, what: str) -> Requirement:
    """Require a run whose mixed precision is not fp16, which is Composer's default on a GPU."""
    return Requirement(
        context.precision != "amp_fp16",
        f"{what} needs bf16, and this run is fp16",
        "add mixed_precision with dtype bf16, or set the precision to amp_bf16",
    )
