"""Embedding: losses against sentence-transformers, gradient caching, several ranks, metrics and export."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from composer.core import Callback
from safetensors.torch import load_file
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModel

from composer_speedups import FusedLayers, FusedOptimizer, ThroughputMonitor, Unpadding
from composer_speedups.core.errors import ConfigError, Refusal
from composer_speedups.data.loader import Data, build_data
from composer_speedups.kernels.common import counting
from composer_speedups.tasks.embedding import Embedding
from composer_speedups.tasks.models import FinetuneModel, _from_config
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.train.out_of_memory import MicrobatchTrainer
from tests.helpers.common import VOCABULARY, Batch, Recorder, fit_and_close, make_trainer
from tests.helpers.jobs import assert_resumes_exactly, run_on_files
from tests.helpers.models import UNPADDED, Family, tiny_model
from tests.helpers.ranks import on_ranks
from tests.helpers.texts import collated, tiny_encoder, tokenizer_of, triples, write_rows
from tests.helpers.unpadded import way
from tests.reference.loop import gradients, train_on
from tests.reference.tolerance import assert_near

# Composer warns about evaluation batches shorter than the usual size.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot split .* of length:UserWarning")
ROWS = triples(24)
THREE = ("anchor", "positive", "negative")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of([row[column] for row in ROWS for column in THREE])


def built(task: Embedding, tokenizer: Any, *, dropout: float = 0.0) -> Any:
    encoder = tiny_encoder(tokenizer, dropout=dropout, add_pooling_layer=False)
    return FinetuneModel(encoder, task, tokenizer, max_length=12).train()


def loss_and_gradients(model: Any, batch: Batch, seed: int = 0) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model.loss(model(batch), batch)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model.model)}


def sentence_transformer(model: Any, folder: Path) -> SentenceTransformer:
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    model.task.export(folder, model.config.hidden_size, model.max_length)
    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(
    ("columns", "loss", "cache"),
    [(THREE[:2], "ranking", None), (THREE, "ranking", None), (THREE, "ranking", 5), (THREE[:2], "cosine", None)],
)
def test_loss_and_gradients_equal_those_of_sentence_transformers(
    columns: Sequence[str], loss: str, cache: int | None, pooling: str, tokenizer: Any, tmp_path: Path
) -> None:
    label = "score" if loss == "cosine" else None
    task = Embedding(
        text_columns=columns, loss_name=loss, label_column=label, pooling=pooling, gradient_cache=cache, temperature=0.1
    )
    model = built(task, tokenizer)
    batch = collated(task, ROWS[:8], tokenizer)
    assert batch["input_ids"].shape[:2] == (8, len(columns))
    actual = loss_and_gradients(model, batch)

    reference = sentence_transformer(model, tmp_path)
    features = [reference.preprocess([row[column] for row in ROWS[:8]]) for column in columns]
    criterion: Any
    if loss == "cosine":
        criterion = losses.CosineSimilarityLoss(reference)
    elif cache is None:
        criterion = losses.MultipleNegativesRankingLoss(reference, scale=10.0)
    else:
        criterion = losses.CachedMultipleNegativesRankingLoss(reference, scale=10.0, mini_batch_size=cache)
    expected = criterion(features, torch.tensor([row["score"] for row in ROWS[:8]]))
    expected.backward()
    inner = gradients(reference[0].model)
    assert not any(bool(g.any()) for name, g in inner.items() if "pooler" in name)
    inner = {name: g for name, g in inner.items() if "pooler" not in name}
    assert_near(actual, {"loss": expected.detach(), **inner})


def test_gradient_caching_with_dropout_recomputes_with_the_same_random_numbers(tokenizer: Any) -> None:
    """The reference encodes the same chunks and keeps all their activations."""
    task = Embedding(text_columns=THREE, gradient_cache=7)
    model = built(task, tokenizer, dropout=0.3)
    batch = collated(task, ROWS[:8], tokenizer)
    actual = loss_and_gradients(model, batch)
    assert not torch.equal(actual["loss"], loss_and_gradients(model, batch, seed=1)["loss"]), "dropout is on"

    torch.manual_seed(0)
    model.zero_grad()
    texts = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
    parts = [{name: rows[start : start + 7] for name, rows in texts.items()} for start in range(0, 24, 7)]
    chunks = [task._encode(model.model, part) for part in parts]
    expected = task.loss({"logits": torch.cat(chunks).view(8, 3, -1)}, batch)
    expected.backward()
    assert_near(actual, {"loss": expected.detach(), **gradients(model.model)})


def trained(
    model: Any, batches: list[Batch], *algorithms: Any, callbacks: Sequence[Callback] = ()
) -> tuple[Any, Recorder]:
    recorder = Recorder()
    trainer = make_trainer(algorithms, model=model, batches=batches, callbacks=[recorder, *callbacks])
    return fit_and_close(trainer), recorder


def ranking_loss(encoder: Any, batch: Batch) -> Tensor:
    """The ranking loss on the mean of each text's token vectors, without false negatives, in plain PyTorch."""
    pooled = []
    for ids, mask in zip(batch["input_ids"].unbind(1), batch["attention_mask"].unbind(1), strict=True):
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
        pooled.append(hidden.sum(1) / mask.sum(1, keepdim=True))
    anchors, candidates = pooled[0], torch.cat(pooled[1:])
    scores = torch.cosine_similarity(anchors[:, None], candidates[None], dim=-1) / 0.05
    return -scores.log_softmax(-1).diagonal().mean()


@pytest.mark.supports("in code", task="embedding")
@pytest.mark.parametrize(("cache", "check"), [(None, "auto"), (5, "auto"), (5, "always")])
def test_the_fast_set_trains_like_plain_pytorch_and_counts_every_batch_once(
    cache: int | None, check: Any, tokenizer: Any
) -> None:
    task = Embedding(text_columns=THREE, gradient_cache=cache)
    model = built(task, tokenizer)
    batches = [collated(task, ROWS[start : start + 6], tokenizer) for start in (0, 6, 12)]
    expected = train_on(model.model, batches, ranking_loss)
    speed = ThroughputMonitor()
    techniques = [Unpadding(8, check=check), FusedLayers(check=check), FusedOptimizer()]
    with counting() as ran:
        trainer, recorder = trained(model, batches, *techniques, callbacks=[speed])
    assert_near(recorder.losses, expected.losses, what="losses")
    assert_near(recorder.first_gradients, expected.first_gradients, what="gradients")
    assert_near(trainer.state.model.model.state_dict(), expected.weights, what="weights")
    for technique in techniques[:2]:
        if check == "auto":  # families with parity tests, such as BERT, are not compared at run time
            assert "compared_with_untouched" not in technique.evidence
        else:
            assert technique.evidence["compared_with_untouched"]["loss"] < 1e-4
    if check == "auto":
        assert (way(ran), ran["counted_in_the_call"]) == ("packed", 0)
    assert [(b.samples, b.tokens, b.slots) for b in speed.batches] == [
        (6, int(batch["attention_mask"].sum()), batch["input_ids"].numel()) for batch in batches
    ]


@pytest.mark.parametrize("family", UNPADDED)
def test_every_family_is_unpadded_as_a_bare_encoder(family: Family, tokenizer: Any) -> None:
    task = Embedding(text_columns=THREE)
    batch = collated(task, ROWS[:6], tokenizer)
    batch["input_ids"] %= VOCABULARY
    recorded = []
    for algorithms in ([], [Unpadding(8)]):
        config = tiny_model(family).config
        torch.manual_seed(0)
        model = FinetuneModel(_from_config(AutoModel, config, task, "float32"), task)
        assert not any("pooler" in name for name, _ in model.named_parameters())
        _, recorder = trained(model, [batch], *algorithms)
        recorded.append(recorder)
    assert_near(recorded[1].losses, recorded[0].losses, what="losses")
    assert_near(recorded[1].first_gradients, recorded[0].first_gradients, what="gradients")


def test_gradient_caching_keeps_no_activations(tokenizer: Any) -> None:
    """Count the elements that autograd saves for the backward pass, without the weights."""
    kept: dict[int | None, int] = {}
    for cache in (None, 3):
        task = Embedding(text_columns=THREE, gradient_cache=cache)
        model, batch = built(task, tokenizer), collated(task, ROWS, tokenizer)
        weights = {p.data_ptr() for p in model.parameters()}
        saved: list[Tensor] = []

        def keep(tensor: Tensor, to: list[Tensor] = saved) -> Tensor:
            to.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.loss(model(batch), batch)
        kept[cache] = sum({x.data_ptr(): x.numel() for x in saved if x.data_ptr() not in weights}.values())
    assert kept[None] > 20 * 72 * 32, "more than 20 hidden states of size 32 for each of the 72 texts"
    assert kept[3] < 0.1 * kept[None]


def test_similarities_are_float32_under_autocast() -> None:
    vectors = torch.nn.functional.normalize(torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    for task in (Embedding(), Embedding(loss_name="cosine", label_column="score")):
        ids = torch.arange(32).view(16, 2, 1)
        batch = {"labels": torch.linspace(0, 1, 16), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = task.loss({"logits": vectors}, batch)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(task.loss({"logits": vectors}, batch), expected)


class ReadsPadding(Embedding):
    name = ""

    def _encode(self, model: Any, texts: Any) -> Tensor:
        return model(**texts)["last_hidden_state"].mean(1)


def test_pooling_that_reads_padding_is_refused_though_the_first_batch_has_none(tokenizer: Any) -> None:
    model = built(ReadsPadding(), tokenizer)
    full = [{"anchor": "amber birch cedar", "positive": "cedar birch amber"}, {"anchor": "a b c", "positive": "c b a"}]
    batch = {key: value[..., :5] for key, value in collated(Embedding(), full, tokenizer).items()}
    assert bool(batch["attention_mask"].all())
    with pytest.raises(Refusal, match=r"^unpadding: its result differs from the untouched model's"):
        trained(model, [batch], Unpadding())


def gradients_on_a_rank(tokenizer: Any, task: Embedding, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Train this rank's share of the rows in DDP; return the mean loss and DDP's averaged gradients."""
    model = built(task, tokenizer)
    parallel = DistributedDataParallel(model)
    mine = rows[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
    batch = collated(task, mine, tokenizer)
    loss = model.loss(parallel(batch), batch)
    loss.backward()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    return {"loss": mean / 2, **gradients(model.model)}


@pytest.mark.parametrize("cache", [None, 5])
def test_two_ranks_average_to_the_gradients_of_one_process(cache: int | None, tokenizer: Any) -> None:
    task = Embedding(text_columns=THREE, gradient_cache=cache)
    ranks = on_ranks(lambda: gradients_on_a_rank(tokenizer, task, ROWS[:12]))
    model = built(task, tokenizer)
    expected = loss_and_gradients(model, collated(task, ROWS[0:12:2] + ROWS[1:12:2], tokenizer))
    for rank in ranks:
        assert_near(rank, expected)


# Row 1 occurs twice; row 3 has row 0's anchor; row 4 has row 0's anchor as positive and row 1's positive as negative.
REPEATED = [ROWS[0], ROWS[1], ROWS[1], {**ROWS[3], "anchor": ROWS[0]["anchor"]},
            {**ROWS[4], "positive": ROWS[0]["anchor"], "negative": ROWS[1]["positive"]}, ROWS[5]]  # fmt: skip


def without_false_negatives(model: Any, rows: list[dict[str, Any]], tokenizer: Any) -> Tensor:
    """Return the loss without negatives that equal the anchor or its positive, or are an equal anchor's positive."""
    with torch.no_grad():
        vectors = model({**collated(model.task, rows, tokenizer)})["logits"]
    candidates = [(i, column) for column in (1, 2) for i in range(len(rows))]
    losses = []
    for i, row in enumerate(rows):
        kept = [
            (j, column)
            for j, column in candidates
            if (j, column) == (i, 1)
            or (
                rows[j][THREE[column]] not in (row["anchor"], row["positive"])
                and not (column == 1 and rows[j]["anchor"] == row["anchor"])
            )
        ]
        scores = torch.stack([vectors[i, 0] @ vectors[j, column] for j, column in kept]) / 0.05
        losses.append(-scores.log_softmax(-1)[kept.index((i, 1))])
    return torch.stack(losses).mean()


def repeated_on_a_rank(tokenizer: Any) -> float:
    """Return the loss of this rank's half of REPEATED; the halves are padded to different lengths."""
    model = built(Embedding(text_columns=THREE), tokenizer)
    mine = REPEATED[3 * torch.distributed.get_rank() :][:3]
    batch = collated(model.task, mine, tokenizer)
    return float(model.loss(model(batch), batch))


def test_equal_texts_are_not_negatives_in_one_process_and_over_ranks(tokenizer: Any) -> None:
    model = built(Embedding(text_columns=THREE), tokenizer)
    batch = collated(model.task, REPEATED, tokenizer)
    expected = without_false_negatives(model, REPEATED, tokenizer)
    torch.testing.assert_close(model.loss(model(batch), batch), expected)
    wide = {name: torch.nn.functional.pad(batch[name], (3, 2)) for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(model.task.loss(model(batch), {**batch, **wide}), expected)
    others = {"input_ids": torch.arange(18).view(6, 3, 1), "attention_mask": torch.ones(6, 3, 1, dtype=torch.int64)}
    with torch.no_grad():
        assert float(expected) < float(model.task.loss(model(batch), {**batch, **others})) - 0.05
    losses = on_ranks(lambda: repeated_on_a_rank(tokenizer))
    assert sum(losses) / 2 == pytest.approx(float(expected), rel=1e-5)


@pytest.fixture
def files() -> None:
    write_rows("train.jsonl", ROWS)
    write_rows("eval.jsonl", triples(13, seed=1))  # no multiple of the batch size


train_in_process = functools.partial(run_on_files, "embedding", 12)


def expected_metrics() -> dict[str, float]:
    """Return the exported model's metrics, computed with sentence-transformers and plain Python."""
    rows = triples(13, seed=1)
    model = SentenceTransformer("runs/quickstart/model", device="cpu")
    anchors, positives = (model.encode([row[column] for row in rows]) for column in ("anchor", "positive"))
    scores = anchors @ positives.T
    ranks = [sorted(-scores[i]).index(-scores[i, i]) for i in range(len(rows))]
    return {
        "recall@1": sum(rank < 1 for rank in ranks) / len(ranks),
        "recall@10": sum(rank < 10 for rank in ranks) / len(ranks),
        "spearman": float(spearmanr(scores.diagonal(), [row["score"] for row in rows]).statistic),
    }


@pytest.mark.parametrize("loss", ["ranking", pytest.param("cosine", marks=pytest.mark.exhaustive)])
@pytest.mark.supports("export", task="embedding")
def test_a_run_reports_what_its_export_scores_in_sentence_transformers(loss: str, files: None) -> None:
    more = ["model.loss=cosine", "data.label_column=score", "model.pooling=cls"] if loss == "cosine" else []
    report = train_in_process(*more, "model.gradient_cache=6")
    names = ["spearman"] if loss == "cosine" else ["recall@1", "recall@10"]
    expected = expected_metrics()
    for name in names:
        assert report["metrics"][name] == pytest.approx(expected[name], abs=1e-5)
    assert report["throughput"]["samples_per_sec"] < report["throughput"]["tokens_per_sec"] / 2
    assert Path("runs/quickstart/model/2_Normalize").is_dir()
    weights = load_file("runs/quickstart/model/model.safetensors")
    assert not [name for name in weights if "pooler" in name]


@pytest.mark.exhaustive
@pytest.mark.supports("resume", task="embedding")
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(files: None) -> None:
    settings = ["model.dropout=0.1", "model.gradient_cache=5", "checkpoint.interval=2ba"]
    assert_resumes_exactly(*settings, checkpoints=["ep0-ba2"], train=train_in_process)


@pytest.mark.parametrize(
    ("cache", "fix"),
    [
        (None, "needs whole; set model.gradient_cache=12"),
        (6, "needs whole; set model.gradient_cache=3"),
        (1, "needs whole; lower data.max_length"),
    ],
)
def test_out_of_memory_names_the_key_that_helps(
    cache: int | None, fix: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Embedding(text_columns=THREE, gradient_cache=cache)
    batch = collated(task, ROWS[:8], tokenizer)
    trainer = make_trainer(model=built(task, tokenizer), batches=[batch], cls=MicrobatchTrainer)
    monkeypatch.setattr(FinetuneModel, "forward", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError, match=rf"out of memory with a micro-batch of 8, and .*{fix}"):
        fit_and_close(trainer)


def loaders(columns: Sequence[str] = THREE, **settings: Any) -> Data:
    settings = {"tokenizer": "wordpiece", "vocab_size": 300, "max_length": 24, "batch_size": 8, **settings}
    config = DataConfig(source="files", train_file="train.jsonl", padding="longest", pad_to_multiple_of=1, **settings)
    return build_data(config, Embedding(text_columns=columns), model_name="", on_gpu=False)


def test_batches_cannot_be_split(files: None) -> None:
    data = loaders(THREE[:2], eval_file="eval.jsonl")
    batch = next(iter(data.train.dataloader))
    assert data.train.get_num_samples_in_batch(batch) == 8
    assert data.train.get_num_tokens_in_batch(batch) == int(batch["attention_mask"].sum())
    assert len(data.train.split_batch(batch, 8)) == 1
    with pytest.raises(ConfigError, match=r"trainer.microbatch_size: the loss needs the whole batch"):
        data.train.split_batch(batch, 4)
    assert len(data.eval.split_batch(batch, 4)) == 2


def test_length_batching_groups_by_the_longest_text_of_a_row() -> None:
    """A batch is padded to its longest text, so a row's length is that of its longest text, not the sum."""
    write_rows("train.jsonl", triples(200, seed=3))
    padding, seen = {}, set()
    for pool in (None, 4):
        masks = [batch["attention_mask"] for batch in loaders(length_batching=pool).train.dataloader]
        real = sum(int(mask.sum()) for mask in masks)
        seen.add((len(masks), real))
        padding[pool] = 1 - real / sum(mask.numel() for mask in masks)
    assert len(seen) == 1, "every token once"
    assert padding[4] < 0.85 * padding[None]  # grouping by the sum gives 0.95
