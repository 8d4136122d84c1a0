"""What a technique is: settings, what it needs, how it changes a run, and the proof that it took effect.

A technique's declaration imports neither Composer nor torch at its top. Composer's Trainer calls the methods of its
Algorithm that the base class has; they hand all techniques of the run to :mod:`.host`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY
from enum import IntEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.settings import Settings

if TYPE_CHECKING:
    from composer.core import Algorithm
else:
    Algorithm = object  # Composer need not be installed; :meth:`Technique.model_post_init` registers it

Effect = Literal["exact", "rounding", "lower_precision", "recipe"]  # from the smallest change to the largest
OnUnavailable = Literal["stop", "warn"]
Check = Literal["auto", "always", "never"]
FSDP: Final = "FSDP"  # in ``not_with``: the technique needs whole weights
NOT_YET: Final[dict[str, Any]] = {}  # the answer of ``proof`` that asks to see the next batch; compared by identity


class Order(IntEnum):
    """The stage at which a technique engages. Within a stage, techniques engage by name."""

    FLAGS = auto()  # process-wide flags and precision
    LAYERS = auto()  # replaces modules or their forward
    ADAPTERS = auto()  # freezes or adds parameters
    KERNELS = auto()  # computes layers with this package's kernels
    OPTIMIZER = auto()  # sees the final parameters
    COMPILE = auto()  # sees the final modules
    GRAPHS = auto()  # captures the final step


class Technique(Settings, Algorithm, eq=False, strict=True):
    """A change of a training run that shows that it took effect.

    A subclass declares its settings and the class variables below, and defines the methods that it needs. For an event
    of Composer, such as ``batch_end`` or ``before_forward``, it defines a method of that name: ``batch_end(self, run)``
    is called in every step.

    Attributes:
        name: The YAML name.
        order: When it engages.
        effect: How it changes the numerical result; :meth:`effect_with` if settings or the device matter.
        not_with: Name of a technique that it cannot be combined with, or :data:`FSDP` → the reason. One of the two
            techniques states it. A conflict that depends on settings is one of the :meth:`needs`.
        purpose: What it improves, for README's table.
        computes_on_host: Whether a part of each step runs on the CPU.
        fixed_shapes: Whether the micro-batch size must not change during training.
        matmul_precision: The precision of most matmuls (``bf16``, ``fp16`` or ``fp8``), if the technique sets it.
        evidence: What was replaced, observed or counted; written to report.json.
        engaged: None before the run began; then whether it is in force and, as far as is known, has an effect.
    """

    name: ClassVar[str]
    order: ClassVar[Order]
    effect: ClassVar[Effect]
    not_with: ClassVar[Mapping[str, str]] = {}
    purpose: ClassVar[Literal["saves time", "saves memory", "adds capacity"]] = "saves time"
    computes_on_host: ClassVar[bool] = False
    not_recorded: ClassVar[tuple[str, ...]] = ("on_unavailable",)
    find_unused_parameters: ClassVar[bool] = False  # read by Composer, as is the next one
    backwards_create_graph: ClassVar[bool] = False

    if TYPE_CHECKING:
        _: KW_ONLY

    on_unavailable: OnUnavailable = Field("stop")
    """stop: a technique that cannot engage ends the run with the reason; warn: the run continues without it."""

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if (algorithm := getattr(sys.modules.get("composer.core"), "Algorithm", None)) is not None:
            algorithm.register(Technique)

    def reset(self) -> None:
        self.engaged: bool | None = None
        self.evidence: dict[str, Any] = {}

    # What a technique defines.

    def needs(self, run: Run) -> Iterable[Refusal]:
        """Yield the refusals that can be known before anything changes. ``run.model`` may be None."""
        return ()

    def precision_after(self, run: Run) -> str:
        """The precision of the forward pass once this technique has engaged."""
        return run.precision

    def engage(self, run: Run) -> Mapping[str, Any]:
        """Change the run, append to ``run.undo`` what is to be given back, and return evidence.

        May raise Refusal, or ValueError with the reason against this model, before it has changed anything.
        """
        raise NotImplementedError

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        """Evidence of the effect in the observed batch, or :data:`NOT_YET` to be asked again after the next batch.

        Raises:
            Refusal: The technique had no effect; see :meth:`no_effect`.
        """
        raise NotImplementedError

    def summary(self, run: Run) -> Mapping[str, Any]:
        """What was counted, as evidence at the end of training and, in other loops, whenever it is read."""
        return {}

    def state(self, run: Run) -> dict[str, Any]:
        """The technique's own state for a checkpoint, of plain values and tensors. Called on every rank."""
        return {}

    def load_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state` returned, before the optimizers' state is loaded."""

    def export(self, run: Run, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The trained model's weights as the stock model's. Called on rank 0; may write files beside ``folder``."""
        return weights

    @classmethod
    def effect_with(cls, settings: Mapping[str, Any], device: str | None) -> Effect:
        """The effect with these settings on ``cpu`` or ``cuda``; None stands for the device with the larger effect."""
        return cls.effect

    @property
    def fixed_shapes(self) -> bool:
        return False

    @property
    def matmul_precision(self) -> str | None:
        return None

    # What a technique calls.

    def refusal(self, reason: str, fix: str) -> Refusal:
        return Refusal(self.name, reason, fix)

    def no_effect(self, reason: str, fix: str) -> Refusal:
        """The refusal of a technique that was applied but had no effect."""
        return Refusal(self.name, f"was applied but did not take effect: {reason}", fix)

    # What Composer calls of an Algorithm.

    def match(self, event: Any, state: Any = None) -> bool:
        if not isinstance(self, Technique):  # called on a class, so self is the event
            state, event = event, self
        if event._value_ != "init":  # not ==, which compares strings
            return False
        from composer_speedups.core.engaging import techniques_of

        techniques_of(state.algorithms)  # refuses what is no algorithm before Composer calls its match
        return True

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        from composer_speedups.core.host import begin

        begin(state, logger)

    def state_dict(self) -> dict[str, Any]:
        return {"repr": repr(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the host loads the state of all techniques."""

    @staticmethod
    def required_on_load() -> bool:
        """Whether a checkpoint's weights can be loaded only with the technique."""
        return False


class ComparedTechnique(Technique):
    """Computes the model's result itself; :mod:`.first_comparison` compares it with the untouched model's."""

    not_recorded = (*Technique.not_recorded, "check")

    if TYPE_CHECKING:
        _: KW_ONLY

    check: Check = Field("auto")
    """Compare loss, outputs and gradients of the first micro-batch with the untouched model's. auto: only if the model
    is not exactly transformers' own."""

    @property
    def needs_16_bits(self) -> bool:
        """Whether to compare in the precision of training instead of float32."""
        return False
