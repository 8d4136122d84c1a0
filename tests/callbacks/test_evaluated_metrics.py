"""BestWeights and EarlyStopping in a Composer Trainer of one's own, on scripted values of a metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from composer import Evaluator, Trainer
from composer.callbacks import EarlyStopper
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch import Tensor
from torchmetrics import Metric

from composer_speedups import BestWeights, EarlyStopping
from composer_speedups.core.errors import ConfigError
from tests.helpers.common import SAVING, data_spec, fit_and_close, in_turn, make_trainer, plain_batches, tiny_bert
from tests.helpers.ranks import on_ranks

LENGTH = 12  # batches, with an evaluation and a checkpoint every 2


class Scripted(Metric):
    """A metric whose value depends only on the number of trained batches."""

    full_state_update = False
    values: Mapping[int, float] = {}
    batch = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, *_: Any) -> None:
        self.count: Tensor = self.count + 1

    def compute(self) -> Tensor:
        return torch.tensor(self.values[Scripted.batch])


class CrossEntropy(Scripted):  # reported as loss
    pass


class MulticlassAccuracy(Scripted):  # reported as accuracy
    pass


class WordsWrong(Scripted):
    higher_is_better = False


class Weights(Callback):
    """Records the weights after each batch, and tells the scripted metrics how many batches were trained."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}

    def eval_start(self, state: State, logger: Logger) -> None:
        Scripted.batch = state.timestamp.batch.value

    def batch_end(self, state: State, logger: Logger) -> None:
        self.after[state.timestamp.batch.value] = weights_of(state)


def weights_of(state: State) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.model.state_dict().items()}


@pytest.fixture(autouse=True)
def _no_values() -> Iterator[None]:
    yield
    for kind in (CrossEntropy, MulticlassAccuracy, WordsWrong):
        kind.values = {}


def trainer_with(
    callback: Callback,
    values: list[float],
    kind: type[Scripted] = CrossEntropy,
    extra: Sequence[Callback] = (),
    **settings: Any,
) -> Trainer:
    """Return a Trainer that evaluates after every second batch, to these values."""
    kind.values = {2 * (i + 1): value for i, value in enumerate(values)}
    metrics: Any = [kind(sync_on_compute=False)]
    evaluated = plain_batches(dist.get_world_size())
    return make_trainer(
        model=HuggingFaceModel(tiny_bert(dropout=0.1), use_logits=True, eval_metrics=metrics, metrics=[]),
        eval_dataloader=data_spec(evaluated, sampler=in_turn(evaluated)),
        eval_interval="2ba",
        callbacks=[Weights(), callback, *extra],
        **{"batches": plain_batches(LENGTH), **settings},
    )


def recorded(trainer: Trainer) -> dict[int, dict[str, Tensor]]:
    return next(c.after for c in trainer.state.callbacks if isinstance(c, Weights))


NAN = math.nan


@pytest.mark.parametrize(
    ("kind", "metric", "mode", "values", "best"),
    [
        (CrossEntropy, "loss", None, [3, 1, 2, 2, 2, 2], 4),
        (CrossEntropy, "CrossEntropy", "max", [3, 1, 4, 2, 2, 2], 6),
        (MulticlassAccuracy, "accuracy", None, [0.3, 0.1, 0.9, 0.2, 0.9, 0.2], 6),
        (MulticlassAccuracy, "accuracy", "min", [0.3, 0.1, 0.9, 0.2, 0.9, 0.2], 4),
        (WordsWrong, "WordsWrong", None, [3, 4, 5, 6, 2, 7], 10),
        (CrossEntropy, "loss", None, [NAN, 3, NAN, 2, math.inf, -math.inf], 8),
        (MulticlassAccuracy, "accuracy", None, [1, 2, 3, 4, 5, 6], 12),
    ],
)
def test_the_best_weights_are_those_after_the_best_evaluation(
    kind: type[Scripted], metric: str, mode: Any, values: list[float], best: int
) -> None:
    callback = BestWeights(metric, mode)
    trainer = fit_and_close(trainer_with(callback, values, kind))
    assert callback.batch == best
    assert callback.restore(trainer.state)
    torch.testing.assert_close(weights_of(trainer.state), recorded(trainer)[best], rtol=0, atol=0)
    summary = callback.summary()
    assert (summary["value"], summary["batch"]) == (pytest.approx(values[best // 2 - 1]), best)
    assert summary["last_value"] == pytest.approx(values[-1])
    (logger,) = trainer.logger.destinations
    assert [float(value) for _, value in logger.data["best/batch"]][-1] == best  # type: ignore[attr-defined]


def test_without_a_finite_value_the_last_weights_remain() -> None:
    callback = BestWeights()
    trainer = fit_and_close(trainer_with(callback, [NAN] * 6))
    assert not callback.restore(trainer.state)
    assert callback.summary() == {}
    torch.testing.assert_close(weights_of(trainer.state), recorded(trainer)[LENGTH], rtol=0, atol=0)


def test_an_evaluation_of_other_data_does_not_count() -> None:
    best, stopping = BestWeights(), EarlyStopping(patience="6ba")
    trainer = trainer_with(best, [5.0, 4.0, 3.0, 2.0, 3.0, 4.0], extra=[stopping])
    trainer.fit()
    CrossEntropy.values = {LENGTH: 0.5}
    with pytest.warns(UserWarning, match="label 'eval' was already provided"):  # Composer's
        trainer.eval(data_spec(plain_batches(1)))
    trainer.close()
    assert (best.batch, best.last, stopping.best) == (8, 4.0, 2.0)


@pytest.mark.parametrize("loaded", [2, 6, 10])
def test_a_resumed_run_has_the_best_weights_of_the_uninterrupted_one(loaded: int) -> None:
    """The best evaluation comes after batch 6, and a later one would be best of those after batch 10."""
    values = [3.0, 2.0, 1.0, 2.0, 4.0, 3.0]
    whole = BestWeights()
    fit_and_close(trainer_with(whole, values, save_folder="saved", **SAVING))
    resumed = BestWeights()
    trainer = trainer_with(resumed, values, load_path=f"saved/ba{loaded}.pt")
    fit_and_close(trainer)
    assert resumed.summary() == whole.summary()
    assert resumed.metrics == whole.metrics == {"loss": 1.0}
    resumed.restore(trainer.state)
    torch.testing.assert_close(weights_of(trainer.state), dict(whole.weights), rtol=0, atol=0)


def test_two_callbacks_of_a_class_are_refused_and_a_derived_class_is_not() -> None:
    """Composer's checkpoints hold one state per class."""
    with pytest.raises(ConfigError, match="callbacks: BestWeights is listed twice"):
        make_trainer(callbacks=[BestWeights(), BestWeights("accuracy")])

    class BestAccuracy(BestWeights):
        pass

    make_trainer(callbacks=[BestWeights(), BestAccuracy("accuracy")])


def test_a_callback_of_another_metric_than_the_checkpoints_starts_anew() -> None:
    """A loss of 0.05 would be an accuracy that no evaluation stays below."""
    values = [0.05, 0.06, 0.07, 0.2, 0.3, 0.4]
    fit_and_close(trainer_with(EarlyStopping(patience="30ba"), values, save_folder="saved", **SAVING))
    changed = EarlyStopping("accuracy", patience="30ba")
    smaller = [0.9, 0.9, 0.01, 0.02, 0.03, 0.04]
    with pytest.warns(UserWarning, match="EarlyStopping starts anew: the checkpoint's compared min loss of eval"):
        fit_and_close(trainer_with(changed, smaller, MulticlassAccuracy, load_path="saved/ba4.pt"))
    assert (changed.best, changed.best_batch) == (pytest.approx(0.04), LENGTH)


@pytest.mark.parametrize(
    ("values", "settings", "stops"),
    [
        ([3, 2, 1, 1, 1, 1], {"patience": "2ba"}, 10),
        ([3, 2, 1, 1, 0, 1], {"patience": "2ba"}, 12),
        ([3, 2.9, 2.8, 2.7, 2.6, 2.5], {"patience": "4ba", "min_delta": 0.5}, 8),
        ([3, 2.9, 2.8, 2.4, 2.3, 2.2], {"patience": "4ba", "min_delta": 0.5}, 12),
        ([3, 2, 2, 2, 2, 2], {"patience": "6ba"}, 12),
    ],
)
def test_it_stops_where_composers_own_early_stopper_does(
    values: list[float], settings: dict[str, Any], stops: int
) -> None:
    reference = fit_and_close(trainer_with(EarlyStopper("CrossEntropy", "eval", "less", **settings), values))
    assert reference.state.timestamp.batch.value == stops
    callback = EarlyStopping(**settings)
    trainer = fit_and_close(trainer_with(callback, values))
    assert trainer.state.timestamp.batch.value == stops
    assert callback.stopped == (stops < LENGTH)
    fit_and_close(trainer_with(EarlyStopping(**settings), values, save_folder="saved", **SAVING))
    for loaded in range(2, min(stops + 2, LENGTH), 2):  # the last one is of the run that has stopped
        resumed = EarlyStopping(**settings)
        trainer = fit_and_close(trainer_with(resumed, values, load_path=f"saved/ba{loaded}.pt"))
        assert trainer.state.timestamp.batch.value == stops
        assert resumed.summary() == callback.summary()


def test_a_later_fit_continues_and_resumes() -> None:
    values = [1.0, 4.0, 3.0, 0.5, 0.4, 0.3]
    stopping = EarlyStopping(patience="2ba")
    trainer = trainer_with(stopping, values, save_folder="saved", **SAVING)
    trainer.fit()
    assert (trainer.state.timestamp.batch.value, stopping.stopped) == (6, True)
    trainer.fit(duration="6ba")
    trainer.close()
    assert (trainer.state.timestamp.batch.value, stopping.stopped) == (LENGTH, False)
    resumed = EarlyStopping(patience="2ba")
    trainer = fit_and_close(trainer_with(resumed, values, load_path="saved/ba8.pt"))
    assert (trainer.state.timestamp.batch.value, resumed.summary()) == (LENGTH, stopping.summary())


def test_larger_values_of_an_accuracy_are_improvements_and_a_nan_is_not() -> None:
    callback = EarlyStopping("accuracy", patience="2ba")
    trainer = fit_and_close(trainer_with(callback, [NAN, 0.1, 0.2, 0.3, 0.2, 0.2], MulticlassAccuracy))
    assert trainer.state.timestamp.batch.value == 12
    assert (callback.best, callback.best_batch) == (pytest.approx(0.3), 8)
    small = EarlyStopping("accuracy", "min", patience="2ba")
    assert fit_and_close(trainer_with(small, [1, 2, 3, 4, 5, 6], MulticlassAccuracy)).state.timestamp.batch.value == 6


@pytest.mark.parametrize("kind", [BestWeights, EarlyStopping])
def test_an_unknown_metric_is_refused_before_training(kind: Any) -> None:
    trainer = trainer_with(kind("accurracy"), [1.0] * 6, MulticlassAccuracy)
    with pytest.raises(
        ConfigError, match=r"^metric: 'accurracy' is not a metric of the evaluation; did you mean 'accuracy'\?"
    ):
        trainer.fit()
    with pytest.raises(ConfigError, match="there is no evaluation"):
        make_trainer(callbacks=[kind()]).fit()
    named = [Evaluator(label=label, dataloader=data_spec(plain_batches(1))) for label in ("dev", "test")]
    with pytest.raises(
        ConfigError, match=r"^dataloader_label: no evaluator has the label 'eval'; set it to one of dev, test$"
    ):
        make_trainer(callbacks=[kind()], eval_dataloader=named, eval_interval="1ba").fit()


def _train_on_a_rank() -> dict[str, Any]:
    first = torch.distributed.get_rank() == 0
    values = [3.0, 2.0, 3.0, 3.0, 3.0, 3.0] if first else [3.0, 3.5, 2.0, 3.0, 3.0, 3.0]
    best, stopping = BestWeights(), EarlyStopping(patience="2ba")
    settings: dict[str, Any] = {"batches": plain_batches(2 * LENGTH), "max_duration": f"{LENGTH}ba"}
    trainer = fit_and_close(trainer_with(best, values, extra=[stopping], **settings))
    after = recorded(trainer)
    last = weights_of(trainer.state)
    best.restore(trainer.state)
    torch.testing.assert_close(weights_of(trainer.state), after[4], rtol=0, atol=0)
    return {
        "batch": best.batch,
        "kept": bool(best.weights),
        "stopped_after": trainer.state.timestamp.batch.value,
        "stopped": stopping.stopped,
        "last_is_best": all(torch.equal(value, after[4][name]) for name, value in last.items()),
    }


def test_rank_0_decides_what_is_best_and_all_ranks_stop_together() -> None:
    """The ranks' values differ, as rounding may make them on GPUs. Rank 1 alone would be best after batch 6."""
    first, second = on_ranks(_train_on_a_rank)
    assert first == {"batch": 4, "kept": True, "stopped_after": 8, "stopped": True, "last_is_best": False}
    assert second == {**first, "kept": False}
