"""What a technique may read and change: one run, decided before its first batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from composer.core import State
    from composer.loggers import Logger

    from composer_speedups.core.technique import Technique


@dataclass(eq=False)
class Run:
    """One training run: of a Composer Trainer, or of any other loop.

    Attributes:
        device: The device of this rank.
        precision: Precision of the forward pass: ``fp32``, ``amp_bf16`` or ``amp_fp16``.
        model: The model that is trained; None while settings are checked before a model exists.
        optimizers: Its optimizers; empty if the loop passed none.
        ranks: Number of processes that train together.
        microbatch_size: Samples of a micro-batch, ``"auto"``, or None for whole batches.
        sharded: Whether FSDP or tensor parallelism shards the model across ranks.
        techniques: The techniques of this run by name, in the order in which they engage.
        state: Composer's State; None in other loops.
        logger: Composer's Logger; None in other loops.
        observing: Whether the present batch is observed, so that nothing may be captured.
        undo: Gives back forwards, classes, hooks and flags, in reverse order, when the run closes. Parameters,
            adapters, experts and the optimizer's state stay.
    """

    device: torch.device
    precision: str = "fp32"
    model: Any = None
    optimizers: Sequence[Any] = ()
    ranks: int = 1
    microbatch_size: int | float | str | None = None
    sharded: bool = False
    techniques: dict[str, Technique] = field(default_factory=dict)
    state: State | None = None
    logger: Logger | None = None
    observing: bool = False
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def in_other_loop(self) -> bool:
        """Whether the model is trained by another loop than Composer's."""
        return self.model is not None and self.state is None

    @property
    def autocast(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.precision != "fp32"

    def give_back(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function(*args)`` when the run closes."""
        self.undo.callback(function, *args)

    def __reduce__(self) -> Any:
        """The model references its run; copies and pickles of the model get None instead."""
        return type(None), ()


@dataclass
class FirstBatch:
    """What was observed of the first batch whose optimizer step was taken.

    Attributes:
        operators: aten operators that ran outside of compiled code, by name such as ``_fused_adamw_``, in the forward
            and backward pass and in the optimizer's step.
        matmul_dtypes: The dtypes of the results of matrix products outside of compiled code, such as ``bfloat16``.
        ran: What this package's own code reported (:func:`composer_speedups.kernels.common.ran`), by name: kernels
            launched, encoders that ran packed, blocks that were recomputed, graphs that were replayed.
        graphs: Graphs that torch.compile captured since the techniques engaged.
        steps: Number of steps of the run's own optimizers.
        moved: Number of parameters that the step changed, among those that have a gradient; None if all learning rates
            are 0 or so small that a step may round to nothing.
        trained: Number of parameters that have a gradient.
        outputs: The dtypes of the model's outputs.
        ended: Whether training is over, so that there will be no further batch.
    """

    operators: Counter[str] = field(default_factory=Counter)
    matmul_dtypes: set[str] = field(default_factory=set)
    ran: Counter[str] = field(default_factory=Counter)
    graphs: int = 0
    steps: int = 0
    moved: int | None = None
    trained: int = 0
    outputs: set[str] = field(default_factory=set)
    ended: bool = False
