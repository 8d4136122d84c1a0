# ruff: noqa: E501
"""The cache of frozen blocks: training equals that without it, also with micro-batches, graphs and after a resume."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import DataSpec
from composer.models import HuggingFaceModel
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from composer_speedups import (
    FusedLayers,
    GradientCheckpointing,
    IndexedRows,
    LayerFreezing,
    ThroughputMonitor,
    TorchCompile,
    Unpadding,
)
from composer_speedups.algorithms.layer_freezing.cache import PrefixCache
from composer_speedups.algorithms.layer_freezing.modules import freeze
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import folder_of
from composer_speedups.core.run import Run
from composer_speedups.families.blocks import first_layers
from composer_speedups.kernels.common import counting
from composer_speedups.packing.call import Prefix, take_row_lengths, with_known_batch
from composer_speedups.packing.rows import ROW_INDICES, count_rows
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import FinetuneModel
from tests.algorithms.test_cuda_graphs_segments import LAYERS, bert
from tests.helpers.common import VOCABULARY, Batch, batch, final_weights, fit_and_close, make_trainer
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.jobs import assert_resumes_exactly, run
from tests.helpers.models import FUSED, UNPADDED, tiny_model
from tests.helpers.rerun import graphed
from tests.helpers.unpadded import unpad_and_fuse
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

LENGTHS = [9, 3, 12, 1, 7, 16, 5, 10, 8, 2, 14, 4]


def samples(pad: int = 0) -> list[Batch]:
    rows = batch(LENGTHS, 16, seed=4)
    ids = rows["input_ids"].masked_fill(rows["input_ids"] == pad, pad + 1)
    rows["input_ids"] = ids.masked_fill(rows["attention_mask"] == 0, pad)
    return [{name: values[i] for name, values in rows.items()} for i in range(len(LENGTHS))]


def stacked(rows: list[Batch]) -> Batch:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def indexed(rows: Any = None, collate: Callable[[Any], Any] = stacked, **settings: Any) -> DataLoader[Any]:
    data = IndexedRows(rows or samples(), collate)
    generator = torch.Generator().manual_seed(2)
    settings = {"batch_size": 4, "shuffle": True, "generator": generator, **settings}
    return DataLoader(data, collate_fn=data.collate, **settings)


def train(cache: bool, model: Any, others: Any = (), loader: Any = None, **settings: Any) -> Any:
    technique = LayerFreezing(layers=1, cache=cache)
    loader = loader or indexed(samples(model.config.pad_token_id))
    given = {"train_dataloader": loader, "max_duration": "3ep", "device_train_microbatch_size": 4, **settings}
    trainer = make_trainer(
        [technique, Unpadding(pad_to_multiple_of=8, check="never"), *others], model=model, batches=[], **given
    )
    fit_and_close(trainer)
    return final_weights(trainer), technique, trainer


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_have_the_indices_of_their_samples(workers: int) -> None:
    rows, seen = samples(), []
    for one in indexed(rows, num_workers=workers):
        indices = one.pop(ROW_INDICES).tolist()
        torch.testing.assert_close(dict(one), stacked([rows[index] for index in indices]), rtol=0, atol=0)
        seen += indices
    assert sorted(seen) == list(range(len(rows)))
    assert seen != sorted(seen)


# Training


FUSABLE = [(family, family in FUSED) for family in UNPADDED if family != "albert"]


@pytest.mark.parametrize(("family", "fused"), others_exhaustive(FUSABLE, lambda case: case[0] in ("bert", "mpnet")))
def test_three_epochs_give_the_weights_of_training_without_the_cache(family: str, fused: bool) -> None:
    others = [FusedLayers()] if fused else []
    cached, plain = (train(cache, tiny_model(family, layers=3), others)[0] for cache in (True, False))
    before = {f"model.{name}": p.detach() for name, p in tiny_model(family, layers=3).named_parameters()}
    assert_near(cached, plain, what=family)
    moved = [name for name, weight in cached.items() if not torch.equal(weight, before[name])]
    assert any(".1." in name for name in moved)
    assert not any("embeddings.word" in name or ".0." in name for name in moved)


@pytest.mark.parametrize("rows", [3, 4])
def test_micro_batches_and_evaluations_between(rows: int) -> None:
    evaluated = DataSpec(DataLoader(samples(), batch_size=4, collate_fn=stacked))  # type: ignore[arg-type]
    given = {"eval_dataloader": evaluated, "eval_interval": "1ba", "device_train_microbatch_size": rows}
    with counting() as ran:
        weights, technique, _ = train(True, bert(), **given)
    batches, micro = 9, 9 if rows == 4 else 18
    assert ran["packed_encoder"] == micro + 3 * batches, "one pass per micro-batch, and three per evaluation"
    assert ran["cached_block"] == micro
    assert_near(weights, train(False, bert(), **given)[0], what="weights")
    assert technique.evidence["cache"] == f"{sum(LENGTHS) * 32 * 4 / 2**30:.3g} GiB in host memory"
    assert technique.evidence["cache_seconds"] >= 0


def test_checkpointed_blocks_are_recomputed_behind_the_prefix() -> None:
    with counting() as ran:
        cached = train(True, bert(), [GradientCheckpointing()])[0]
    assert ran["recomputed_block"] == 9 * (LAYERS - 1)
    assert_near(cached, train(False, bert())[0], what="weights")


def test_frozen_blocks_have_no_dropout_and_are_computed_once_per_sample() -> None:
    model = tiny_model("bert", layers=3, dropout=0.5)
    calls: list[bool] = []
    model.bert.encoder.layer[0].register_forward_hook(lambda module, *_: calls.append(module.training))
    train(True, model)
    assert calls == [False] * 3, "12 samples, 4 at a time, once"
    assert model.training


@contextlib.contextmanager
def known(model: Any, inputs: Batch, hidden: Tensor | None = None) -> Iterator[Batch]:
    """Let calls know the row lengths of their batch, and start behind one block if its output is given."""
    counted = {**inputs, **count_rows(inputs, [model.bert.encoder.packing.rules])}
    batch = take_row_lengths(counted, 8)
    if hidden is not None:
        batch = batch._replace(rows=(batch.rows[0]._replace(prefix=Prefix(hidden, 1)),))
    with with_known_batch(batch):
        yield counted


def without_dropout_in_front(model: Any) -> Any:
    freeze(model, (), 1)
    for module in first_layers(model, 1).values():
        module.eval()
    return model


def output_of_first_block(model: Any, inputs: Batch) -> Tensor:
    kept: list[Any] = []
    hook = model.bert.encoder.layer[0].register_forward_hook(lambda *args: kept.append(args[2].detach().clone()))
    with known(model, inputs) as given, torch.no_grad():
        model(**given)
    hook.remove()
    return kept[0]


def values(model: Any, inputs: Batch, hidden: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    with known(model, inputs, hidden) as given:
        output = model(**given)
    output.loss.backward()
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), **gradients(model)}


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_behind_the_prefix_draws_the_dropout_of_a_whole_step(graphs: bool) -> None:
    model = without_dropout_in_front(unpad_and_fuse(tiny_model("bert", layers=3, dropout=0.3).train()))
    calls = graphed(model, max_graphs=4) if graphs else None
    for seed in range(2):
        inputs = batch([12, 7, 16, 10], seed=seed)
        hidden = output_of_first_block(model, inputs)
        assert_near(values(model, inputs, hidden), values(model, inputs, None), what=f"batch {seed}")
    if calls is not None:
        assert (calls.graphs, calls.replays) == (2, 4), "with a prefix and without"


def test_a_run_resumes_exactly() -> None:
    job = ["trainer.max_duration=3ep", "checkpoint.interval=4ba", "model.dropout=0.1", "algorithms.sdpa_attention=null"]
    job += [
        "algorithms.unpadding={}",
        "algorithms.fused_layers={}",
        "algorithms.layer_freezing={layers: 1, cache: true}",
    ]
    whole = assert_resumes_exactly(*job, checkpoints=["ep0-ba4", "ep1-ba8"])
    assert "cache" in whole["algorithms"]["layer_freezing"]["evidence"]


OTHER = [pytest.param([f"model.task={t}"], marks=pytest.mark.exhaustive) for t in ("embedding", "token_classification")]


@pytest.mark.parametrize("more", [*OTHER, ["data.padding=max_length", "data.batch_size=null", "data.batch_tokens=200"]])
def test_other_tasks_and_batches_train_as_without_the_cache(more: list[str]) -> None:
    job = [
        *more,
        "model.dropout=0.0",
        "trainer.max_duration=2ep",
        "optimizer.eps=1e-3",
        "algorithms.unpadding={}",
    ]
    for cache in ("true", "false"):
        freezing = f"algorithms.layer_freezing={{layers: 1, cache: {cache}}}"
        run(*job, "algorithms.sdpa_attention=null", "data.train_samples=16", freezing, f"run_name={cache}")
    cached, plain = (load_file(f"runs/{cache}/model/model.safetensors") for cache in ("true", "false"))
    assert_near(cached, plain, what=more[-1])


def test_the_loader_of_the_card_trains() -> None:
    *_, code = re.findall(r"```python\n(.*?)```", (folder_of("layer_freezing") / "README.md").read_text(), re.DOTALL)
    model = HuggingFaceModel(bert(), use_logits=True)
    names: dict[str, Any] = {"model": model, "dataset": samples(), "collate": stacked}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(code, names)
    names["trainer"].close()
    assert "cache" in names["trainer"].state.algorithms[0].evidence


def test_train_py_says_the_size_before_training_and_counts_the_cache_as_warm_up(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "__str__", lambda _: "2.8 GiB on the GPU")
    job = ["algorithms.sdpa_attention=null", "algorithms.unpadding={}", "trainer.progress_bar=true"]
    report = run(*job, "algorithms.layer_freezing={layers: 1, cache: true}")
    lines = capfd.readouterr().err.splitlines()
    said = lines.index("the frozen blocks' outputs take 2.8 GiB on the GPU, and are computed first")
    assert not any(line.startswith("training ") for line in lines[:said])
    seconds = report["algorithms"]["layer_freezing"]["evidence"]["cache_seconds"]
    assert report["throughput"]["warmup_seconds"] >= seconds - 0.01


# Refusals


def run_of(**settings: Any) -> Run:
    return Run(torch.device("cpu"), **settings)


PACKED = {"unpadding": Unpadding()}
NEEDS: list[tuple[LayerFreezing, Run, str]] = [
    (LayerFreezing(cache=True), run_of(techniques=PACKED), "layer_freezing: cache keeps the outputs of blocks, and none is frozen; set layers to a number"),
    (LayerFreezing(layers=1, cache=True), run_of(), "layer_freezing: cache keeps packed tokens, and nothing packs them; add unpadding"),
    (LayerFreezing(layers=1, cache=True), run_of(techniques=PACKED, ranks=2), "layer_freezing: cache needs one process, and this run has 2; remove cache"),
    (LayerFreezing(layers=1, cache=True), run_of(techniques=PACKED | {"torch_compile": TorchCompile()}), "layer_freezing: cache stops the forward pass behind a block, which compiled code cannot; remove one"),
    (LayerFreezing(layers=1, cache=True), run_of(techniques=PACKED | {"fused_layers": FusedLayers(precision="fp8")}), "layer_freezing: cache is filled before the scales of 8-bit layers are learned; remove one"),
    (LayerFreezing(layers=1, cache=True), run_of(techniques=PACKED, model=bert()), "layer_freezing: cache needs Composer's Trainer, and this is another loop; leave it out"),
]  # fmt: skip


@pytest.mark.parametrize(("technique", "of", "message"), NEEDS, ids=[message[22:50] for *_, message in NEEDS])
def test_what_cache_needs(technique: LayerFreezing, of: Run, message: str) -> None:
    assert [str(refusal) for refusal in technique.needs(of)] == [message]
    assert not [*LayerFreezing(layers=1).needs(of)]


class Masking:
    """A collator that draws anew which tokens it masks."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, rows: list[Batch]) -> Batch:
        found = stacked(rows)
        masked = torch.rand(found["input_ids"].shape, generator=self._generator) < 0.3
        return {**found, "input_ids": found["input_ids"].masked_fill(masked, VOCABULARY - 1)}


class Segments(Masking):
    """A collator that keeps the tokens, but not their kinds."""

    def __call__(self, rows: list[Batch]) -> Batch:
        found, masked = stacked(rows), super().__call__(rows)
        return {**found, "token_type_ids": (found["input_ids"] != masked["input_ids"]).long()}


def left_padded(rows: list[Batch]) -> Batch:
    return {name: values.flip(-1) if values.ndim == 2 else values for name, values in stacked(rows).items()}


def two_masks(rows: list[Batch]) -> Batch:
    found = stacked(rows)
    return {**found, "other_input_ids": found["input_ids"], "other_attention_mask": found["attention_mask"]}


class Shortened:
    """A collator that shortens the rows after so many calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, rows: list[Batch]) -> Batch:
        self.calls -= 1
        found = stacked(rows)
        return (
            found if self.calls >= 0 else {**found, "attention_mask": found["attention_mask"] * (torch.arange(16) < 6)}
        )


def splits_by_name() -> DataSpec:
    def split(one: Batch, _: Any) -> list[Batch]:
        return [{name: one[name] for name in ("input_ids", "attention_mask", "labels")}]

    return DataSpec(indexed(), split_batch=split)  # type: ignore[arg-type]


REFUSED: list[tuple[Any, str]] = [
    (splits_by_name, "a micro-batch does not say which samples it has; keep all entries in a split_batch of your own"),
    (lambda: DataLoader(samples(), batch_size=4, collate_fn=stacked), "the batches do not say which samples they have; in code, build the DataLoader from IndexedRows; in a YAML, read samples that are not streamed"),  # type: ignore[arg-type]
    (lambda: indexed(collate=Masking()), "the collator returns other tokens at each call, as for masked LM or with augmentation; make it return the same"),
    (lambda: indexed(collate=Segments()), "the collator returns other tokens at each call, as for masked LM or with augmentation; make it return the same"),
    (lambda: indexed(collate=left_padded), "unpadding keeps some rows padded; pad on the right, without holes"),
    (lambda: indexed(collate=two_masks), "a batch has 2 attention masks instead of one; give it one, on the CPU"),
    (lambda: indexed(collate=Shortened(6)), "samples have other lengths in a batch than before; remove what changes the batches"),
]  # fmt: skip


@pytest.mark.parametrize(("loader", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_data_that_cannot_be_cached(loader: Any, message: str) -> None:
    with pytest.raises(Refusal) as error:
        train(True, bert(), loader=loader())
    assert str(error.value) == f"layer_freezing: cache: {message}, or remove cache"


class TwoViews(HuggingFaceModel):
    """Calls the model twice with the same mask, and other tokens in the second call."""

    def forward(self, batch: Any) -> Any:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        once, again = self.model(**inputs), self.model(**{**inputs, "input_ids": inputs["input_ids"].roll(1, 0)})
        return {**once, "loss": once["loss"] + again["loss"]}


def test_a_second_call_with_the_batchs_mask_does_not_get_the_first_ones_outputs() -> None:
    with pytest.raises(Refusal, match=r"outputs of 1 of 2 calls of frozen blocks came from the cache; call the model"):
        train(True, TwoViews(bert()))


def test_a_cache_of_all_blocks_leaves_nothing_to_fuse() -> None:
    reason = "cache leaves fused_layers no block to compute; freeze fewer blocks, or remove it"
    with pytest.raises(Refusal, match=reason):
        train(True, tiny_model("bert", layers=1), [FusedLayers()])


def test_outputs_that_do_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 100

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    with pytest.raises(Refusal, match=r"^layer_freezing: cache: the outputs of 91 tokens take 0 GiB; train"):
        train(True, bert())


def test_a_cache_that_is_refused_may_be_left_out() -> None:
    loader: Any = DataLoader(samples(), batch_size=4, collate_fn=stacked)  # type: ignore[arg-type]
    technique = LayerFreezing(layers=1, cache=True, on_unavailable="warn")
    settings: dict[str, Any] = {"train_dataloader": loader, "max_duration": "3ba", "device_train_microbatch_size": 4}
    with pytest.warns(UserWarning, match="the batches do not say which samples they have"):
        fit_and_close(make_trainer([technique, Unpadding()], model=bert(), batches=[], **settings))
    assert technique.evidence["applied"] == "had no effect, kept"


@pytest.mark.filterwarnings("ignore:continuing although layer_freezing")
def test_flops_leave_out_the_frozen_blocks_only_if_their_outputs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, model = [], FinetuneModel(bert(), Classification())
    for free, left in (([], 0), ([100, 2**40], 1), ([2**40], 0), ([], 0)):
        monkeypatch.setattr("psutil.virtual_memory", lambda free=free: SimpleNamespace(available=free.pop(0)))
        monitor, technique = ThroughputMonitor(), LayerFreezing(layers=1, cache=bool(free), on_unavailable="warn")
        given: dict[str, Any] = {"train_dataloader": indexed(), "max_duration": "2ep", "callbacks": [monitor]}
        given["device_train_microbatch_size"] = 4
        fit_and_close(make_trainer([technique, Unpadding(check="never")], model=model, batches=[], **given))
        assert len(free) == left, "a refusal is not tried again in the second epoch"
        sums.append(sum(one.flops for one in monitor.batches))
    plain, refused, kept, again = sums
    assert kept < plain == refused == again
