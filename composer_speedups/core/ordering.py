"""One stated order for all techniques, and the clashes among them, as Composer algorithm passes.

Both passes may be given to ``Trainer(algorithm_passes=[refuse_clashes, sort_techniques])`` and are by
train.py. Without them the order still holds: whichever technique Composer runs first at INIT engages all of
them through :func:`engage_all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from enum import IntEnum
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.utils.reproducibility import seed_context

from composer_speedups.core.errors import ConfigError, TechniqueError
from composer_speedups.core.requirements import Context

if TYPE_CHECKING:
    from composer_speedups.core.technique import Technique

__all__ = ["Stage", "engage_all", "refuse_clashes", "resume_error", "screen", "sort_techniques", "techniques_of"]


class Stage(IntEnum):
    """When a technique engages. Within a stage the YAML name decides, so that any list gives one order."""

    FLAGS = 0  # process-wide flags and precision
    SURGERY = 1  # modules replaced
    KERNELS = 2  # layers computed by kernels that build on what surgery did
    ADAPTERS = 3  # parameters frozen or added
    OPTIMIZER = 4  # sees the final parameters
    COMPILE = 5  # sees the final modules
    GRAPHS = 6  # captures the final step


def techniques_of(algorithms: Sequence[Algorithm]) -> list[Technique]:
    """The techniques of this package in a list of algorithms, in the order they engage."""
    from composer_speedups.core.technique import Technique  # it imports this module

    return sorted((a for a in algorithms if isinstance(a, Technique)), key=lambda t: (t.stage, t.name))


def sort_techniques(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Composer pass: the techniques in their one order, in the places that techniques held before."""
    techniques = techniques_of(algorithms)
    if event.name.startswith("AFTER_") and event != Event.AFTER_LOAD:
        techniques.reverse()  # what was opened last before is closed first after, as Composer does it
    ordered = iter(techniques)
    ours = set(map(id, techniques_of(algorithms)))
    return [next(ordered) if id(a) in ours else a for a in algorithms]


def refuse_clashes(algorithms: Sequence[Algorithm], event: Event | None = None) -> Sequence[Algorithm]:
    """Composer pass: stop when two techniques cannot go together.

    Raises:
        TechniqueError: Names both techniques and the fix.
    """
    del event
    for one, other in combinations(techniques_of(algorithms), 2):
        if one.name == other.name:
            raise TechniqueError(one.name, "is asked for twice", "name it once")
        shared = one.slot is not None and one.slot == other.slot
        reason = one.clash(other) or other.clash(one)
        if shared:
            reason = f"both set the {one.slot}"
        if reason:
            raise TechniqueError(
                one.name, f"clashes with {other.name}: {reason}", f"take {one.name} or {other.name} out"
            )
    return algorithms


def screen(techniques: Sequence[Technique], context: Context) -> None:
    """Check clashes and requirements, before anything is built or changed.

    A technique whose requirements are not met raises, or warns and is marked unavailable when its
    ``on_unavailable`` is ``"warn"``.
    """
    refuse_clashes(techniques)
    for technique in techniques_of(techniques):
        try:
            if context.sharded and technique.not_sharded:
                raise TechniqueError(
                    technique.name, technique.not_sharded, "train without FSDP (DDP works), or take it out"
                )
            for met, reason, fix in technique.requirements(context):
                if not met:
                    stops = technique.on_unavailable == "stop"
                    other = ", or set on_unavailable=warn to go on without it" if stops else ""
                    raise TechniqueError(technique.name, reason, fix + other)
        except TechniqueError as error:
            technique.unavailable(error)
        else:
            context = replace(context, techniques=context.techniques | {technique.name})


def engage_all(state: State) -> None:
    """Engage every technique of ``state.algorithms`` in the one order; a second call does nothing."""
    techniques = techniques_of(state.algorithms)
    for technique in reversed(techniques):  # it undoes what an earlier Trainer left, as closing that one would
        technique.begin(state)
    if all(t.engaged is not None for t in techniques):
        return
    screen(techniques, Context.of(state))
    for technique in techniques:
        technique.before_engaging(state)
    state.callbacks.append(_TechniqueKeeper(techniques, state.algorithms))
    # Composer seeds each rank differently: DDP then copies rank 0's new weights to all, FSDP takes a shard of each.
    same_draws = nullcontext() if state.fsdp_config is None else seed_context(state.rank_zero_seed)
    with same_draws:
        for technique in techniques:
            technique.peers = sorted(map(repr, techniques))
            if technique.engaged is None:
                try:
                    technique.evidence.update(technique.engage(state))
                    technique.engaged = technique.applied = True
                except TechniqueError as error:
                    technique.unavailable(error)


def resume_error(recorded: list[str], current: list[str]) -> ConfigError:
    """The error of resuming under other techniques than the checkpoint's."""
    return ConfigError(
        f"the checkpoint was written with techniques [{', '.join(recorded)}] and this run has "
        f"[{', '.join(current)}]; resume with the same ones, or load the weights only"
    )


class _TechniqueKeeper(Callback):
    """Closes techniques with the Trainer, in the reverse of the order they engaged in, and has checkpoints list them.

    Algorithms have no close event, callbacks do. Nor is an algorithm told of a checkpoint that was written without it:
    this is, where any technique was in force then.
    """

    checkpoint_fields: ClassVar[dict[str, Any]] = {"techniques": list[str]}

    def __init__(self, techniques: Sequence[Technique], algorithms: Sequence[Algorithm]) -> None:
        self._techniques = techniques
        self._algorithms = algorithms  # the Trainer's own list: loading a checkpoint may add to it

    def state_dict(self) -> dict[str, Any]:
        return {"techniques": sorted(map(repr, techniques_of(self._algorithms)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (recorded := state["techniques"]) != (current := self.state_dict()["techniques"]):
            raise resume_error(recorded, current)

    def close(self, state: State, logger: Logger) -> None:
        with ExitStack() as stack:  # the last engaged is undone first, and one that raises keeps no other from it
            for technique in self._techniques:
                if technique.belongs_to(state):  # not to a later Trainer, which closes it itself
                    stack.callback(technique.close)
