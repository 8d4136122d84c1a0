"""The base class of all techniques: each one engages or is refused, and all engage in one fixed order.

train.py passes :func:`refuse_conflicts` and :func:`sort_techniques` to Composer's Trainer as algorithm passes. Without
them the order still holds, because the first technique that Composer runs at INIT engages all of them.
"""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.utils.reproducibility import seed_context
from pydantic import Field

from composer_speedups.core.errors import ConfigError, NotEngagedError, TechniqueError, UserError
from composer_speedups.core.requirements import Context, Requirement
from composer_speedups.core.settings import Settings

__all__ = [
    "FSDP",
    "Conflict",
    "Exactness",
    "OnUnavailable",
    "Stage",
    "Technique",
    "TechniqueGuard",
    "Variant",
    "conflicts_between",
    "engage_all",
    "refuse_conflicts",
    "refuse_other_techniques",
    "screen",
    "sort_techniques",
    "techniques_of",
]

OnUnavailable = Literal["stop", "warn"]
Exactness = Literal["exact", "rounding", "lower_precision", "recipe"]  # from the smallest change to the largest
Purpose = Literal["saves time", "saves memory", "adds capacity"]
FSDP = "FSDP"  # the ``other`` of a Conflict for techniques that need unsharded weights

_BEFORE_FORWARD = (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD)


class Stage(IntEnum):
    """When a technique engages. Within a stage, techniques are ordered by their YAML names."""

    FLAGS = 0  # process-wide flags and precision
    SURGERY = 1  # replaces modules
    ADAPTERS = 2  # parameters frozen or added
    KERNELS = 3  # runs layers with custom kernels; builds on SURGERY and ADAPTERS
    OPTIMIZER = 4  # sees the final parameters
    COMPILE = 5  # sees the final modules
    GRAPHS = 6  # captures the final step


@dataclass(frozen=True)
class Conflict:
    """Another technique that cannot be combined with this one. One of the two declares it.

    Attributes:
        other: Name of the other technique, or :data:`FSDP`.
        why: The reason, as the end of "NAME conflicts with OTHER: …".
        when: Called with the technique that declares the conflict and with the other one; returns whether their
            settings conflict. None means that they always do.
        slot: Instead of ``other`` and ``why``: the part of the run that this technique sets. Techniques with the same
            slot conflict with each other.
    """

    other: str | None = None
    why: str = ""
    when: Callable[[Any, Any], bool] | None = None
    slot: str | None = None


@dataclass(frozen=True)
class Variant:
    """Settings of a technique that tune should try.

    Attributes:
        settings: Constructor arguments.
        with_techniques: Techniques that are added with it, because it needs them or profits from them, and their
            settings.
        device: ``cpu`` or ``cuda`` if the variant makes sense on one of them only.
        fallback: Try this variant only if the previous one is refused.
        gain: Expected gain, if it differs from the technique's.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    with_techniques: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: str | None = None
    fallback: bool = False
    gain: float | None = None


class Technique(Settings, Algorithm, eq=False, strict=True):
    """A Composer algorithm that shows that it took effect.

    A subclass declares its settings and the class attributes below, and defines the methods it needs. While it is in
    force, it receives exactly the Composer events for which it defines a method: ``before_forward(self, state)``,
    ``eval_batch_start(self, state)`` and so on, for any :class:`composer.Event` except INIT, at which it engages.
    ``match`` and ``apply`` are final.

    Attributes:
        name: The YAML name, which is also the name of the folder.
        stage: When it engages.
        exactness: How it changes the numerical result; see :meth:`exactness_with` if settings or the device matter.
        conflicts: Techniques that it cannot be combined with.
        gain: Expected speedup, which orders the trials of tune.
        trials: Variants that tune tries; empty if it costs time by design.
        purpose: What the technique improves. README's table has it; the card and tune mention it unless it is "saves
            time".
        computes_on_host: Part of the training step runs on the CPU.
        matmul_precision: The precision whose peak rate model FLOPs utilization refers to.
        fixed_shapes: It depends on the shape of the batch, so the micro-batch size must not change during training.
        freezes_on_load: Loading its state freezes parameters, for which the checkpoint has no optimizer state. It is
            loaded before the optimizer's state is compared with the run's.
        checkpoint_fields: The keys and types of :meth:`state_dict`. train.py ignores everything else in a checkpoint,
            because anyone may have written the file.
        engaged: None before INIT, then whether the technique is in force and, as far as is known, has an effect.
        applied: Whether it changed the run at INIT; stays True if it later turns out to have had no effect.
        in_force: Whether that change is still in place. A technique that had no effect stays in force and handles its
            events, because the model may depend on them; one that cannot run is withdrawn.
        evidence: What was replaced, observed or counted; written to report.json.
        ended: In :meth:`verify`, whether training is over.
        watching: Closed at the end of an observed forward pass; see :meth:`watch`.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    exactness: ClassVar[Exactness]
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    gain: ClassVar[float] = 1.0
    trials: ClassVar[tuple[Variant, ...]] = (Variant(),)
    purpose: ClassVar[Purpose] = "saves time"
    computes_on_host: ClassVar[bool] = False
    freezes_on_load: ClassVar[bool] = False
    not_recorded: ClassVar[tuple[str, ...]] = ("on_unavailable",)
    checkpoint_fields: ClassVar[dict[str, Any]] = {
        "repr": str,
        "evidence": dict[str, Any] | None,
    }
    _heard: ClassVar[frozenset[Event]]

    _: KW_ONLY
    on_unavailable: OnUnavailable = Field("stop")
    """stop: a technique that cannot engage raises a TechniqueError; warn: the run continues without it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for final in ("match", "apply", "run_event"):
            if final in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{final} would never be called: match and apply are final. Define a method for "
                    "each event that the technique handles, such as batch_end(self, state)"
                )
        cls._heard = frozenset(event for event in Event if hasattr(cls, event.value))

    def reset(self) -> None:
        self.engaged: bool | None = None
        self.applied = self.in_force = self.ended = False
        self.evidence: dict[str, Any] = {}
        self._verified = self._resumed = self._postponed = False
        self._evidence_before: dict[str, Any] | None = None  # from the process that was interrupted
        self.watching = ExitStack()  # hooks and recorders of the forward pass that is observed
        self._state: weakref.ref[State] | None = None  # of the Trainer that it belongs to
        self._logger: weakref.ref[Logger] | None = None

    # Methods that a technique defines.

    def requirements(self, context: Context) -> Iterable[Requirement]:
        """Requirements that can be checked before the model is built."""
        return ()

    def context_after(self, context: Context) -> Context:
        """Return ``context`` with the properties that this technique sets, for techniques that engage after it."""
        return context

    @abstractmethod
    def engage(self, state: State) -> dict[str, Any]:
        """Change ``state`` and return the first evidence. Raises TechniqueError if there is nothing to change."""

    @abstractmethod
    def verify(self, state: State) -> dict[str, Any]:
        """Return evidence of the effect. Called after the first trained batch and at the end of training.

        After :meth:`postpone` the first call comes one batch later. The second call comes once per ``fit()``. Both come
        after the technique's own ``batch_end`` and before its ``fit_end``.

        Raises:
            NotEngagedError: The technique had no effect; raise :meth:`not_engaged`.
        """

    def before_engaging(self, state: State) -> None:
        """Inspect the model before any technique changes it."""

    def before_first_forward(self, event: Event, state: State) -> None:
        """Called before the first forward pass, and before any technique handles its events."""

    def watch(self, state: State) -> None:
        """Start observing a forward pass of the first trained batch. Called after ``before_forward``.

        Contexts that are entered in :attr:`watching` are left when the pass ends, also if it raises.
        """

    def stop_watching(self, state: State) -> None:
        """Read what was observed. Called after ``after_forward``, but not if the forward pass raises."""

    def export(self, state: State, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Convert the trained model's state dict to that of the stock model. Called on rank 0.

        Techniques define this if they rename or add weights. They may write additional files next to ``folder``, to
        which the model is exported.
        """
        return weights

    def close(self) -> None:
        """Restore everything that outlives the Trainer. Called when the Trainer closes, also after an exception."""
        self.watching.close()

    @classmethod
    def exactness_with(cls, settings: Mapping[str, Any], device: str | None) -> Exactness:
        """The exactness with these settings on ``cpu`` or ``cuda``; ``None`` for the less exact of the two devices."""
        return cls.exactness

    @property
    def fixed_shapes(self) -> bool:
        return False

    @property
    def matmul_precision(self) -> str | None:
        """Precision of most of the model's matmuls (``bf16``, ``fp16`` or ``fp8``), if the technique sets it."""
        return None

    # Methods that a technique calls.

    def postpone(self) -> None:
        """Verify after the next batch, because the optimizer did not step in the first one."""
        self._postponed = not self._verified

    def unavailable(self, error: TechniqueError) -> None:
        """Raise ``error``, or warn and mark the technique as not engaged, depending on ``on_unavailable``.

        After a :class:`NotEngagedError` the technique stays in force. After any other error it is no longer in force:
        its caller has restored what it changed, or does so next.
        """
        if self.on_unavailable == "stop":
            raise error
        if self.engaged is not False:
            continuing = "although" if isinstance(error, NotEngagedError) else "without"
            removed = error.fix.endswith("remove the technique")
            key = f", with train.py by algorithms.{error.technique}=null" if removed else ""
            said = f"continuing {continuing} {error.technique}: {error.reason} (to silence this: {error.fix}{key})"
            warnings.warn(str(UserError(said)), UserWarning, stacklevel=3)
        self.engaged = False
        self.in_force = self.in_force and isinstance(error, NotEngagedError)
        self.evidence = {"unavailable": error.reason, "fix": error.fix}
        if self.applied:
            self.evidence["applied"] = "had no effect, kept" if self.in_force else "withdrawn"

    def not_engaged(self, reason: str, fix: str) -> NotEngagedError:
        return NotEngagedError(self.name, f"was applied but did not take effect: {reason}", fix)

    @contextmanager
    def refusals(self, fix: str = "remove it for this model") -> Iterator[None]:
        """Turn a ValueError of the technique's function into a TechniqueError, which says that it cannot engage."""
        try:
            yield
        except ValueError as error:
            raise TechniqueError(self.name, str(error).removeprefix(f"{self.name} "), fix) from error

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Log metrics with the technique's name as the prefix."""
        logger = self._logger() if self._logger is not None else None
        assert logger is not None, "events are handled only while the Trainer exists"
        logger.log_metrics({f"{self.name}/{key}": value for key, value in metrics.items()})

    # Methods that Composer calls.

    def match(self, event: Event, state: State | None = None) -> bool:
        if isinstance(self, Event):  # called on a class in the place of an instance; the arguments are event and state
            techniques_of(cast(State, event).algorithms)  # raises
        if event == Event.INIT and state is not None:
            techniques_of(state.algorithms)  # raises before Composer calls match of something that has none
        if event in (Event.INIT, Event.FIT_END) or self._hears(event):
            return True
        if self._verified or not self.engaged:
            return False
        prepares = type(self).before_first_forward is not Technique.before_first_forward and event in _BEFORE_FORWARD
        return prepares or event in (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        hears, first = self._hears(event), not self._verified
        self._logger, self.ended = weakref.ref(logger), event == Event.FIT_END
        if event == Event.INIT:
            engage_all(state)
        elif event in _BEFORE_FORWARD and first:
            for technique in techniques_of(state.algorithms):  # all of them, before any changes or observes the pass
                technique.before_first_forward(event, state)
        try:
            if event == Event.FIT_END:
                self._verify_at_the_end(state)
        finally:
            if hears:
                getattr(self, event.value)(state)
        if first and self.engaged:
            if event in (Event.BEFORE_FORWARD, Event.AFTER_FORWARD):
                self.watching.close()  # before a pass, it is open if the last one raised
            if event == Event.BEFORE_FORWARD:
                self.watch(state)
            elif event == Event.AFTER_FORWARD:
                self.stop_watching(state)
            elif event == Event.BATCH_END and self._postponed:
                self._postponed = False
            elif event == Event.BATCH_END:
                self._verify(state)

    def _hears(self, event: Event) -> bool:
        undoes = self.applied and event == Event.FIT_END  # what FIT_START did
        return (self.in_force or undoes) and event in self._heard

    def _verify_at_the_end(self, state: State) -> None:
        if not self._verified and self._evidence_before is not None:
            self.evidence.update(self._evidence_before)  # the resumed run had nothing left to train
        elif self.engaged:
            self._verify(state)

    def _verify(self, state: State) -> None:
        self._verified = True
        try:
            self.evidence.update(self.verify(state))
        except NotEngagedError as error:
            self.unavailable(error)

    # The Trainer that the technique belongs to, and resuming from a checkpoint.

    def begin(self, state: State) -> None:
        """Attach to this Trainer. If the technique was used in another one, reset everything except its settings."""
        if self._state is not None and not self.belongs_to(state):
            self.close()
            self.reset()
        self._state = weakref.ref(state)

    def belongs_to(self, state: State) -> bool:
        return self._state is not None and self._state() is state

    def state_dict(self) -> dict[str, Any]:
        evidence = self.evidence if self._verified else self._evidence_before
        return {"repr": repr(self), "evidence": evidence}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed, self._evidence_before = True, state.get("evidence")


def techniques_of(algorithms: Sequence[Algorithm]) -> list[Technique]:
    """The techniques of this package in a list of algorithms, in the order they engage.

    Raises:
        ConfigError: A class instead of its instance, a name, or a list in the list.
    """
    if others := [a for a in algorithms if not hasattr(a, "match") or isinstance(a, type)]:
        raise _refused(others[0])
    return sorted((a for a in algorithms if isinstance(a, Technique)), key=lambda t: (t.stage, t.name))


def _refused(other: Any) -> ConfigError:
    if isinstance(other, type) and issubclass(other, Algorithm):
        return ConfigError(f"algorithms: {other.__name__} is a class, not a technique; write {other.__name__}()")
    if isinstance(other, list):
        return ConfigError("algorithms: a list is in the list; write its items, as in [*recommended(), LoRA()]")
    return ConfigError(f"algorithms: {other!r:.80} is no technique; write an instance, such as Unpadding()")


def sort_techniques(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Composer algorithm pass: put the techniques into their order, without moving other algorithms."""
    techniques = techniques_of(algorithms)
    if event.name.startswith("AFTER_") and event != Event.AFTER_LOAD:
        techniques.reverse()  # the last to start is the first to end, as in Composer
    ordered = iter(techniques)
    return [next(ordered) if isinstance(a, Technique) else a for a in algorithms]


def conflicts_between(one: Any, other: Any) -> Iterator[tuple[Any, Any, Conflict]]:
    """Yield each conflict of two techniques or classes: the one that declares it, the other one, and the conflict."""
    for owner, opponent in ((one, other), (other, one)):
        for conflict in owner.conflicts:
            shared = conflict.slot is not None and any(theirs.slot == conflict.slot for theirs in opponent.conflicts)
            if shared or conflict.other == opponent.name:
                yield owner, opponent, replace(conflict, why=conflict.why or f"both set the {conflict.slot}")


def refuse_conflicts(algorithms: Sequence[Algorithm], event: Event | None = None) -> Sequence[Algorithm]:
    """Composer algorithm pass: refuse techniques that cannot be combined.

    Raises:
        TechniqueError: Names both techniques and the fix.
    """
    del event
    for one, other in combinations(techniques_of(algorithms), 2):
        if one.name == other.name:
            raise TechniqueError(one.name, "is listed twice", "list it once")
        for owner, opponent, conflict in conflicts_between(one, other):
            if conflict.when is None or conflict.when(owner, opponent):
                raise TechniqueError(
                    one.name, f"conflicts with {other.name}: {conflict.why}", f"remove {one.name} or {other.name}"
                )
    return algorithms


def screen(techniques: Sequence[Technique], context: Context) -> None:
    """Check conflicts and requirements before anything is built or changed.

    Each technique is checked in the context that the techniques which engage before it leave
    (:meth:`Technique.context_after`), whatever the order of the list. A technique that the run continues without leaves
    it as it was.

    A technique with unmet requirements raises a TechniqueError. If there are several, the message has the reason of the
    one with the largest gain, and names the others. A technique whose ``on_unavailable`` is ``"warn"`` warns and is
    marked as not engaged instead.
    """
    refuse_conflicts(techniques)
    refused: dict[Technique, TechniqueError] = {}
    for technique in techniques_of(techniques):
        try:
            for conflict in technique.conflicts:
                if context.sharded and conflict.other == FSDP:
                    raise TechniqueError(technique.name, conflict.why, "train without FSDP (DDP works), or remove it")
            for met, reason, fix in technique.requirements(context):
                if not met:
                    stops = technique.on_unavailable == "stop"
                    other = ', or set on_unavailable="warn" to continue without it' if stops else ""
                    raise TechniqueError(technique.name, reason, fix + other)
        except TechniqueError as error:
            if technique.on_unavailable == "warn":
                technique.unavailable(error)
                continue
            refused[technique] = error  # the others are checked as if it engaged, since its error is to be fixed
        after = technique.context_after(context)
        context = replace(after, techniques=context.techniques | {technique.name})
    if refused:
        first = max(refused, key=lambda technique: technique.gain)
        names = ", ".join(technique.name for technique in refused if technique is not first)
        also = f"; these cannot engage either: {names}" if names else ""
        raise TechniqueError(first.name, refused[first].reason, refused[first].fix + also)


def engage_all(state: State) -> None:
    """Engage every technique of ``state.algorithms`` in their order; later calls do nothing."""
    techniques = techniques_of(state.algorithms)
    for technique in reversed(techniques):  # in the order in which closing an earlier Trainer would undo them
        technique.begin(state)
    if all(t.engaged is not None for t in techniques):
        return
    screen(techniques, Context.of(state))
    for technique in techniques:
        technique.before_engaging(state)
    state.callbacks.append(_TechniqueKeeper(techniques, state.algorithms))
    # Composer seeds each rank differently. DDP then broadcasts rank 0's new weights; FSDP keeps a shard of each rank's.
    same_draws = nullcontext() if state.fsdp_config is None else seed_context(state.rank_zero_seed)
    with same_draws:
        for technique in techniques:
            if technique.engaged is None:
                try:
                    technique.evidence.update(technique.engage(state))
                    technique.engaged = technique.applied = technique.in_force = True
                except TechniqueError as error:
                    technique.unavailable(error)


def refuse_other_techniques(recorded: list[str], algorithms: Sequence[Algorithm]) -> None:
    """Refuse to resume a checkpoint of other techniques.

    Args:
        recorded: The sorted representations of the checkpoint's techniques.
        algorithms: Those of the run.

    Raises:
        ConfigError: Names both lists.
    """
    current = sorted(map(repr, techniques_of(algorithms)))
    if recorded != current:
        raise ConfigError(
            f"the checkpoint was written with techniques [{', '.join(recorded)}] and this run has "
            f"[{', '.join(current)}]; resume with the same ones, or load the weights only"
        )


class TechniqueGuard(Callback):
    """Records the techniques in checkpoints; see :func:`refuse_other_techniques`."""

    checkpoint_fields: ClassVar[dict[str, Any]] = {"techniques": list[str]}

    def __init__(self, algorithms: Sequence[Algorithm] = ()) -> None:
        self._algorithms = algorithms  # the Trainer's own list, to which loading a checkpoint may add

    def state_dict(self) -> dict[str, Any]:
        return {"techniques": sorted(map(repr, techniques_of(self._algorithms)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        refuse_other_techniques(state["techniques"], self._algorithms)


class _TechniqueKeeper(TechniqueGuard):
    """Closes techniques with the Trainer, in reverse order, and refuses to resume checkpoints of other techniques.

    It is a callback because Composer does not send a close event to algorithms, and does not call an algorithm's
    ``load_state_dict`` if the checkpoint was written without that algorithm.
    """

    def __init__(self, techniques: Sequence[Technique], algorithms: Sequence[Algorithm]) -> None:
        super().__init__(algorithms)
        self._techniques = techniques

    def after_load(self, state: State, logger: Logger) -> None:
        resumes = state.load_path is not None and state.timestamp.batch.value > 0
        if resumes and not all(technique._resumed for technique in self._techniques):
            refuse_other_techniques([], self._algorithms)  # the checkpoint has no keeper's state

    def close(self, state: State, logger: Logger) -> None:
        with ExitStack() as stack:  # closes in reverse order, and continues if one of them raises
            for technique in self._techniques:
                if technique.belongs_to(state):  # a later Trainer closes its techniques itself
                    stack.callback(technique.close)
