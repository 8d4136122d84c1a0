"""The base class of all techniques: engaged or refused, never silently neither."""

from __future__ import annotations

import inspect
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from composer.core import Algorithm, Event, State
from composer.loggers import Logger

from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.ordering import Stage, engage_all, resume_error, techniques_of
from composer_speedups.core.requirements import Context, Requirement

__all__ = ["OnUnavailable", "Stage", "Technique"]

OnUnavailable = Literal["stop", "warn"]


class Technique(Algorithm):
    """A Composer algorithm that shows it took effect.

    A run goes through :meth:`engage` (at INIT, in the order of :mod:`.ordering`), :meth:`reassert` (after a
    checkpoint was loaded), :meth:`observe` (in the first training batch) and :meth:`verify` (after it).
    A subclass keeps its constructor's arguments under their own names; ``repr`` reads them there.

    Args:
        on_unavailable: ``"stop"`` raises :class:`TechniqueError` when the technique cannot engage;
            ``"warn"`` warns and trains without it.

    Attributes:
        engaged: None before INIT, then whether the technique is in force.
        applied: Whether it changed the run at INIT; stays True when it later turns out to have had no effect.
        evidence: What was replaced, seen or counted; goes to report.json.
        checkpoint_fields: What :meth:`state_dict` holds, by name, each with its type. From a file that anybody may have
            written, train.py takes nothing else.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    slot: ClassVar[str | None] = None  # two techniques with one slot set the same thing, and clash
    clashes: ClassVar[dict[str, str]] = {}  # other technique's name → why; on one side of a pair
    clashes_with_settings: ClassVar[dict[str, str]] = {}  # likewise, where clash() looks at settings
    changes_structure: ClassVar[bool] = False  # a checkpoint's weights fit no model without the technique
    not_sharded: ClassVar[str | None] = None  # why it cannot go with FSDP, which shares the model out
    computes_on_host: ClassVar[bool] = False  # a part of the training step
    not_recorded: ClassVar[tuple[str, ...]] = ("on_unavailable",)  # settings that change nothing of what is trained
    fixed_shapes: bool = False  # holds what was made for one shape of batch: the micro-batch must stay as it is

    checkpoint_fields: ClassVar[dict[str, Any]] = {
        "repr": str,
        "techniques": list[str],
        "evidence": dict[str, Any] | None,
    }

    def __init__(self, *, on_unavailable: OnUnavailable = "stop") -> None:
        if on_unavailable not in ("stop", "warn"):
            raise ValueError(f"on_unavailable must be 'stop' or 'warn', not {on_unavailable!r}")
        self.on_unavailable = on_unavailable
        self.engaged: bool | None = None
        self.applied = False
        self.evidence: dict[str, Any] = {}
        self.peers: list[str] = []
        self._verified = False
        self._resumed = self._postponed = False
        self._evidence_before: dict[str, Any] | None = None  # of the process that was interrupted
        self._state: weakref.ref[State] | None = None  # of the Trainer it works in

    # What a technique defines.

    def requirements(self, context: Context) -> Iterable[Requirement]:
        """What the technique needs, checkable before the model is built."""
        return ()

    def clash(self, other: Technique) -> str | None:
        """Why it cannot go with ``other``; None when it can. ``clashes`` serves where the settings do not matter."""
        return self.clashes.get(other.name)

    @abstractmethod
    def engage(self, state: State) -> dict[str, Any]:
        """Change ``state``; returns the first evidence. Raises TechniqueError when there is nothing to do."""

    def before_engaging(self, state: State) -> None:
        """Look at the model before any technique changes it."""

    def before_first_forward(self, event: Event, state: State) -> None:
        """Before any technique observes a forward pass of the first training batch, or of an evaluation before it."""

    def reassert(self, state: State) -> None:
        """Undo what loading a checkpoint undid."""

    def observe(self, event: Event, state: State) -> None:
        """See the first training batch at BEFORE_FORWARD and AFTER_FORWARD."""

    @abstractmethod
    def verify(self, state: State) -> dict[str, Any]:
        """Evidence from the first trained batch, and again from the whole run at its end.

        Raises:
            NotEngagedError: (through :meth:`not_engaged`) when the technique had no effect.
        """

    def export(self, state: State, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The stock model's state dict from the trained model's; on rank 0, for a model that goes to ``folder``.

        For techniques that change what the weights are called or how many there are. They may write what else
        belongs to the model beside ``folder``.
        """
        return weights

    def close(self) -> None:
        """Give back what outlives the Trainer; called when it closes, also after a run that raised."""

    def begin(self, state: State) -> None:
        """Belong to this Trainer; in another one than before, forget everything but the arguments."""
        if self._state is not None and not self.belongs_to(state):
            self.close()
            arguments = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
            vars(self).update(vars(type(self)(**arguments)))
        self._state = weakref.ref(state)

    def belongs_to(self, state: State) -> bool:
        return self._state is not None and self._state() is state

    # What Composer calls.

    def match(self, event: Event, state: State) -> bool:
        if event in (Event.INIT, Event.AFTER_LOAD, Event.FIT_END):
            return True
        first = (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BATCH_END)
        return not self._verified and bool(self.engaged) and event in first

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            engage_all(state)
        elif event == Event.AFTER_LOAD:
            self._check_resume(state)
            if self.engaged:
                self.reassert(state)
        elif event in (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD):
            self.prepare_first_forward(event, state)
            if event == Event.BEFORE_FORWARD:
                self.observe(event, state)
        elif event == Event.AFTER_FORWARD:
            self.observe(event, state)
        elif event == Event.FIT_END and not self._verified and self._evidence_before is not None:
            self.evidence.update(self._evidence_before)  # resumed with nothing left to train
        elif self._postponed and event == Event.BATCH_END:
            self._postponed = False
        elif self.engaged and event in (Event.BATCH_END, Event.FIT_END):
            self._verified = True
            try:
                self.evidence.update(self.verify(state))
            except NotEngagedError as error:
                self.unavailable(error)

    def prepare_first_forward(self, event: Event, state: State) -> None:
        """Give every technique its turn before any of them prepares or observes a forward pass."""
        if not self._verified:
            for technique in techniques_of(state.algorithms):
                technique.before_first_forward(event, state)

    def postpone(self) -> None:
        """The first batch came to no step of the optimizer, and shows too little: verify after the next one."""
        self._postponed = not self._verified

    def unavailable(self, error: TechniqueError) -> None:
        """Stop the run, or mark the technique as not in force and warn, as ``on_unavailable`` says."""
        if self.on_unavailable == "stop":
            raise error
        if self.engaged is not False:
            going_on = "although" if isinstance(error, NotEngagedError) else "without"
            warnings.warn(f"going on {going_on} {error}", UserWarning, stacklevel=3)
        self.engaged = False
        self.evidence = {"unavailable": error.reason, "fix": error.fix}

    def not_engaged(self, reason: str, fix: str) -> NotEngagedError:
        return NotEngagedError(self.name, f"was applied but did not take effect: {reason}", fix)

    @classmethod
    def required_on_load(cls) -> bool:
        """Composer's word for :attr:`changes_structure`.

        Composer adds such an algorithm by itself when a checkpoint was written with it, but looks for it among its
        own only; for ours, :meth:`load_state_dict` and EngagementReport stop the run instead.
        """
        return cls.changes_structure

    # Resuming: the checkpoint says which techniques it was written under.

    def state_dict(self) -> dict[str, Any]:
        evidence = self.evidence if self._verified else self._evidence_before
        return {"repr": repr(self), "techniques": self.peers, "evidence": evidence}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = True
        if state.get("techniques", self.peers) != self.peers:
            raise resume_error(state["techniques"], self.peers)
        self._evidence_before = state.get("evidence")

    def _check_resume(self, state: State) -> None:
        resuming = state.load_path is not None and state.timestamp.batch.value > 0
        if resuming and not self._resumed:
            raise resume_error([], self.peers)

    def __repr__(self) -> str:
        names = [p for p in inspect.signature(type(self)).parameters if p not in self.not_recorded]
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"
