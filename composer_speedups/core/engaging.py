"""Check techniques and change a model by them, all or none. :mod:`.host` calls it in Composer's Trainer, and
:mod:`.apply` in other loops."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from composer_speedups.core.errors import ConfigError, Refusal
from composer_speedups.core.first_comparison import Comparison
from composer_speedups.core.observer import leave_open
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.stock import outermost_models
from composer_speedups.core.technique import FSDP, NOT_YET, Technique

_RUN = "_composer_speedups_run"  # attribute of a changed model: its run. It is collected together with the model


def techniques_of(algorithms: Iterable[Any], *, alone: bool = False) -> list[Technique]:
    """The techniques in a list of algorithms, in the order in which they engage. Refuses what is no algorithm, and
    with ``alone`` all that are no techniques."""
    algorithms = [algorithms] if isinstance(algorithms, Technique) else list(algorithms)  # which Composer accepts, too
    for other in algorithms:
        if isinstance(other, type) or not hasattr(other, "match"):
            fix = "write instances in one list, as in [*recommended(), LoRA()]"
            raise ConfigError(f"algorithms: {other!r:.80} is no technique; {fix}")
        if alone and not isinstance(other, Technique):
            raise ConfigError(f"algorithms: {other!r:.80} is Composer's; only Composer's Trainer can apply it")
    return sorted((a for a in algorithms if isinstance(a, Technique)), key=lambda t: (t.order, t.name))


def check(techniques: Iterable[Technique], run: Run) -> None:
    """Set ``run.techniques`` to those that can engage, or raise a Refusal, before anything is changed. Each is checked
    with the precision that the preceding ones set."""
    ordered, precision, refused = techniques_of(techniques), run.precision, list[Refusal]()
    run.techniques = {technique.name: technique for technique in ordered}
    refuse_conflicts(ordered)
    try:
        for technique in ordered:
            try:
                _require(technique, run)
            except Refusal as error:
                if technique.on_unavailable == "warn":
                    _warn(run.techniques.pop(technique.name), error, "without")
                    continue
                refused.append(error)  # the others are checked as if it had engaged, to report all errors at once
            run.precision = technique.precision_after(run)
    finally:
        run.precision = precision
    if refused:
        first, *others = refused
        also = f"; these cannot engage either: {', '.join(error.who for error in others)}" if others else ""
        raise Refusal(first.who, first.reason, first.fix + also)


def refuse_conflicts(techniques: Sequence[Technique]) -> None:
    for one, other in itertools.combinations(techniques, 2):
        if one.name == other.name:
            raise one.refusal("is listed twice", "list it once")
        if (why := one.not_with.get(other.name) or other.not_with.get(one.name)) is not None:
            raise one.refusal(f"conflicts with {other.name}: {why}", f"remove {one.name} or {other.name}")


def _require(technique: Technique, run: Run) -> None:
    if run.sharded and FSDP in technique.not_with:
        raise technique.refusal(technique.not_with[FSDP], "train without FSDP (DDP works), or remove it")
    for refusal in technique.needs(run):
        stops = technique.on_unavailable == "stop" and not run.in_other_loop
        other = ', or set on_unavailable="warn" to continue without it' if stops else ""
        raise Refusal(refusal.who, refusal.reason, refusal.fix + other)


def _warn(technique: Technique, error: Refusal, continuing: str) -> None:
    if technique.engaged is not False:
        said = f"continuing {continuing} {error.who}: {error.reason} (to silence this: {error.fix})"
        warnings.warn(str(Refusal(said)), UserWarning, stacklevel=3)
    technique.engaged = False
    technique.evidence = {"unavailable": error.reason, "fix": error.fix}


def engage(run: Run, techniques: Iterable[Technique]) -> Comparison:
    """Undo an earlier run of the same techniques on this model, check them, apply all or none, and return the
    comparison to make."""
    techniques = techniques_of(techniques)
    leave_open()
    _undo_earlier(run.model, techniques)
    for technique in techniques:
        technique.reset()
    check(techniques, run)
    comparison = Comparison(run)
    complete = True
    try:
        for technique in list(run.techniques.values()):
            undo, run.undo = run.undo, ExitStack()
            try:
                if not complete:
                    _require(technique, run)  # a technique that it needs may have been left out
                technique.evidence.update(technique.engage(run))
            except ValueError as error:
                fix = "remove it for this model"
                refusal = error if isinstance(error, Refusal) else technique.refusal(str(error), fix)
                if technique.on_unavailable == "stop":
                    raise refusal from error.__cause__
                run.undo.close()  # what it had changed before
                _warn(run.techniques.pop(technique.name), refusal, "without")
                complete = False
                continue
            finally:
                undo.push(run.undo)
                run.undo = undo
            technique.engaged = True
            run.precision = technique.precision_after(run)
    except BaseException:
        run.undo.close()
        raise
    for model in _marked(run.model):
        vars(model)[_RUN] = (run, sorted(map(repr, techniques)))
        run.give_back(vars(model).pop, _RUN, None)
    return comparison


def _marked(model: nn.Module) -> list[nn.Module]:
    """The modules by which a model is recognized in another Trainer's wrapper."""
    return list(outermost_models(model).values()) or [model]


def _undo_earlier(model: nn.Module, techniques: Sequence[Technique]) -> None:
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise Refusal("techniques", "torch.nn.DataParallel is not supported", "use DistributedDataParallel")
    asked = sorted(map(repr, techniques))
    for key in _marked(model):
        run, names = vars(key).get(_RUN) or (None, asked)
        if names != asked and techniques:
            raise Refusal(
                "techniques",
                f"the model is in use with [{', '.join(names)}], and this run has [{', '.join(asked)}]",
                "close that Trainer (or call undo() of apply's result), or build a new model",
            )
        if run is not None and techniques:
            run.undo.close()


def ask(run: Run, waiting: dict[str, Technique], seen: FirstBatch) -> None:
    """Ask techniques for proof, and take out of ``waiting`` those that answer."""
    for technique in list(waiting.values()):
        try:
            proof = technique.proof(run, seen)
            if proof is NOT_YET:
                if not seen.ended:
                    continue
                raise technique.no_effect(
                    "nothing was seen of it in the observed batches", "train longer, or remove it"
                )
            technique.evidence.update(proof)
        except Refusal as error:
            had_no_effect(technique, error)
        del waiting[technique.name]


def had_no_effect(technique: Technique, error: Refusal) -> None:
    """Raise the refusal of a technique that is in force, or warn, as its ``on_unavailable`` says."""
    if technique.on_unavailable == "stop":
        raise error
    _warn(technique, error, "although")
    technique.evidence["applied"] = "had no effect, kept"


def refuse_other_techniques(recorded: list[str], techniques: Iterable[Technique]) -> None:
    """Refuse to resume a checkpoint of other techniques, whose sorted representations it ``recorded``."""
    current = sorted(map(repr, techniques))
    if recorded != current:
        raise ConfigError(
            f"the checkpoint was written with techniques [{', '.join(recorded)}] and this run has "
            f"[{', '.join(current)}]; resume with the same ones, or load the weights "
            "without the optimizer's state: load_weights_only=True, in a YAML checkpoint.weights_only=true"
        )
