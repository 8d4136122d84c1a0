"""data.batch_tokens: batches of a fixed number of tokens, all of one shape."""

from __future__ import annotations

import copy
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from composer_speedups import Unpadding, apply
from composer_speedups.core.errors import ConfigError, RunFailedError
from composer_speedups.data.batching import TokenBatchSampler
from composer_speedups.data.loader import build_data
from composer_speedups.families.flops import batch_lengths
from composer_speedups.packing.call import take_row_lengths
from composer_speedups.packing.rows import SAMPLES, RowRules, count_rows
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import build_model
from composer_speedups.tasks.settings import DataConfig, ModelConfig
from composer_speedups.tasks.task import task_class
from composer_speedups.train.out_of_memory import MicrobatchTrainer
from tests.helpers.jobs import assert_resumes_exactly, run
from tests.helpers.ranks import on_ranks
from tests.reference.tolerance import assert_near

WIDTH = 64
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3.0, 0.8, size=1003).astype(int), 2, WIDTH)


def microbatches(
    epoch: int, tokens: int, *, ranks: int = 1, parts: int = 1, samples: int = 1003, seed: int = 5, **settings: Any
) -> list[list[list[int]]]:
    """The samples of each micro-batch, by rank; what holds for all of them is checked."""
    torch.rand(3)  # the global generator must not matter
    found = []
    for rank in range(ranks):
        lengths = LENGTHS[:samples]
        sampler = TokenBatchSampler(lengths, tokens, WIDTH, parts, ranks=ranks, rank=rank, seed=seed, **settings)
        sampler.set_epoch(epoch)
        order = np.array(list(sampler))
        assert len(order) == len(sampler)
        cut = order.reshape(-1, sampler.rows)
        assert len(cut) == sampler.batches * parts
        found.append([row[row < samples].tolist() for row in cut])
        for row, mine in zip(cut, found[-1], strict=True):
            filler = row[row >= samples] - samples
            assert LENGTHS[mine].sum() + filler.sum() == tokens
            assert len(mine) > 0
            assert ((filler >= 1) & (filler <= WIDTH)).all()
    return found


@pytest.mark.pins
@pytest.mark.parametrize("settings", [{"tokens": 512}, {"tokens": 256, "ranks": 2, "parts": 3}, {"tokens": 4096}])
def test_every_sample_comes_once_per_epoch_in_an_order_of_seed_and_epoch_alone(settings: dict[str, Any]) -> None:
    epochs = [microbatches(epoch, **settings) for epoch in range(8)]
    for found in epochs:
        samples = [*chain(*chain(*found))]
        assert {*samples} == set(range(1003))
        assert len(samples) - 1003 < len(found) * settings.get("parts", 1), "only the last batch repeats samples"
        assert len({*map(len, found), *map(len, epochs[0])}) == 1, "the same number of micro-batches"
    assert epochs[1] == microbatches(1, **settings) != microbatches(1, seed=6, **settings)
    assert epochs[0] != epochs[1]
    dropped = [*chain(*chain(*microbatches(1, drop_last=True, **settings)))]
    assert len({*dropped}) == len(dropped) < 1003


def test_samples_come_in_the_order_drawn_until_the_next_one_does_not_fit() -> None:
    [found] = microbatches(0, 512)
    order = torch.randperm(1003, generator=torch.Generator().manual_seed(5)).tolist()
    assert [*chain(*found)] == order
    rows = TokenBatchSampler(LENGTHS, 512, WIDTH, seed=5).rows
    for mine, (following, *_) in pairwise(found):
        free, tokens = rows - len(mine) - 1, 512 - LENGTHS[[*mine, following]].sum()
        assert not free <= tokens <= free * WIDTH, "with the next sample, the rows that are free cannot take the rest"
    assert np.mean([LENGTHS[mine].sum() for mine in found[:-1]]) > 0.93 * 512
    shares = microbatches(0, 256, ranks=2)
    assert [*chain(*chain(*zip(*shares, strict=True)))] == order, "ranks take micro-batches in turns"


@pytest.mark.parametrize("samples", [1, 2, 7, 40])
def test_the_last_batch_has_samples_on_every_rank(samples: int) -> None:
    found = microbatches(2, 256, ranks=3, parts=2, samples=samples)
    assert {*chain(*chain(*found))} == set(range(samples))
    assert len([*chain(*chain(*found))]) == max(samples, 6 if samples < 6 else samples)


BUILT_IN: dict[str, Any] = {
    "source": "builtin", "tokenizer": "wordpiece", "vocab_size": 300, "train_samples": 40, "eval_samples": 20,
    "length_scale": 0.12, "max_length": 48, "batch_size": None,
}  # fmt: skip


@pytest.mark.pins
@pytest.mark.parametrize("name", ["classification", "token_classification", "mlm"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_batches_have_one_shape_and_the_loss_and_gradients_of_their_samples(name: str, workers: int) -> None:
    task = task_class(name)()
    config = DataConfig(**BUILT_IN, batch_tokens=256, workers=workers)
    data = build_data(config, task, model_name="", on_gpu=False)
    torch.manual_seed(0)
    stock = build_model(ModelConfig(init="random", size="tiny", dropout=0.0), task, data.tokenizer, 48)
    packed = copy.deepcopy(stock)
    apply(packed.model, [Unpadding()])
    shapes, numbers, samples, tokens = set(), set(), 0, 0
    for batch in data.train.dataloader:
        real = torch.from_numpy(batch[SAMPLES].numpy() == 1)  # a plain tensor
        rows = {name: values[real] for name, values in batch.items() if name != SAMPLES}
        number = data.train.get_num_samples_in_batch(batch)
        assert number == len(rows["labels"]) < len(real)
        known = take_row_lengths({**batch, **count_rows(batch, [RowRules()])}, 64)
        assert known.rows[0].packed is not None
        shapes.add((batch["input_ids"].shape, len(known.rows[0].packed)))
        lengths = batch_lengths(batch)
        assert lengths is not None
        assert lengths.sum() == rows["attention_mask"].sum() == data.train.get_num_tokens_in_batch(batch)
        numbers.add(number)
        samples, tokens = samples + number, tokens + int(lengths.sum())
        losses, gradients = [], []
        for model, inputs in ((stock, rows), (stock, batch), (packed, batch)):
            model.zero_grad()
            loss = model.loss(model(inputs), inputs)
            loss.backward()
            losses.append(loss.detach())
            gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        for i in (1, 2):
            assert_near(losses[i][None], losses[0][None], what="loss")
            assert_near(gradients[i], gradients[0], what="gradients")
    (shape,) = shapes
    assert shape[1] == 256
    assert len(numbers) > 1
    assert samples == len(data.train.dataloader.dataset) == data.train.num_samples == 40  # type: ignore[arg-type]
    assert tokens == sum(data.train.dataloader.dataset.lengths[:40])  # type: ignore[union-attr]


def test_the_training_metrics_of_a_batch_are_those_of_its_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(9, 2, generator=generator), torch.randint(0, 2, (9,), generator=generator)
    filled = torch.cat([labels, torch.full((4,), -100)]), torch.cat([logits, torch.randn(4, 2, generator=generator)])
    metrics = Classification().metrics(training=True)
    for metric in metrics.values():
        metric.update(filled[1], filled[0])
        metric.update(logits[:3], labels[:3])
    again = torch.cat([labels, labels[:3]]), torch.cat([logits, logits[:3]])
    expected = {
        "MulticlassAccuracy": (again[1].argmax(-1) == again[0]).float().mean(),
        "CrossEntropy": F.cross_entropy(again[1], again[0]),
    }
    torch.testing.assert_close({name: metric.compute() for name, metric in metrics.items()}, expected)


TOKENS = ["data.batch_size=null", "data.padding=max_length"]
PACKED = ["algorithms.sdpa_attention=null", "algorithms.unpadding={}", "trainer.device=cpu"]
ALIKE = ["model.dropout=0", "optimizer.eps=1e-3", "scheduler.name=constant", "trainer.max_duration=3ep", *PACKED]


@pytest.mark.parametrize(
    "job", ["seed=17", *(pytest.param(j, marks=pytest.mark.exhaustive) for j in (
        "model.class_weights=[1.0,9.0]", "model.task=token_classification"
    ))]
)  # fmt: skip
def test_micro_batches_and_ranks_count_by_their_samples(job: str) -> None:
    """All 48 samples are one batch, whatever its parts: one by rows, one micro-batch, four, and two on each of two
    ranks, whose numbers of samples differ."""

    def train(name: str, *settings: str) -> dict[str, Any]:
        return run(*ALIKE, job, f"run_name={name}", *settings)

    reports = [train("rows", "data.batch_size=48"), train("whole", *TOKENS, "data.batch_tokens=2048")]
    parts = [*TOKENS, "data.batch_tokens=2048", "trainer.microbatch_tokens=512"]
    reports.append(train("parts", *parts))
    reports.append(on_ranks(lambda: train("ranks", *parts))[0])
    for report in reports[1:]:
        assert report["training"]["batches"] == 3
        assert report["training"]["samples"] == 3 * 48
        assert report["training"]["tokens"] == reports[0]["training"]["tokens"]
        assert report["metrics"]["train_loss"] == pytest.approx(reports[0]["metrics"]["train_loss"], rel=1e-4)
        weights = (load_file(f"runs/{r['run_name']}/model/model.safetensors") for r in (report, reports[0]))
        assert_near(weights[0], weights[1], what=report["run_name"])


def test_a_resumed_run_ends_where_the_uninterrupted_one_does() -> None:
    settings = [*TOKENS, *PACKED, "data.batch_tokens=256", "trainer.max_duration=2ep", "checkpoint.interval=5ba"]
    whole = assert_resumes_exactly(*settings, checkpoints=["ep0-ba5", "ep1-ba10"])
    assert (whole["training"]["samples"], whole["training"]["microbatch_size"]) == (96, 8)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**settings: Any) -> None:
        parts = settings.pop("parts", None)
        config = DataConfig(**BUILT_IN, **settings)
        build_data(config, Classification(), model_name="", on_gpu=False, microbatch_tokens=parts)

    unequal = "data.batch_tokens: 1,001 cannot be shared by 1 ranks in micro-batches of 250; use a multiple"
    few = (
        "data.batch_tokens: 40 tokens per forward pass are too few for samples of up to 48; use at least twice as many"
    )
    last = "data.drop_last: the 40 training samples do not fill one batch of 9,000 tokens"
    for settings, message in [
        ({"batch_tokens": 1001, "parts": 250}, unequal),
        ({"batch_tokens": 40}, few),
        ({"batch_tokens": 9000, "drop_last": True}, last),
    ]:
        with pytest.raises(ConfigError) as error:
            build(**settings)
        assert str(error.value) == message


def test_out_of_memory_names_the_micro_batch_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(MicrobatchTrainer.__mro__[1], "_train_microbatch", full)
    with pytest.raises(RunFailedError, match=r"data.batch_tokens determines it; set trainer\.microbatch_tokens=128"):
        run(*TOKENS, *PACKED, "data.batch_tokens=256")
