"""Unpadding in a Trainer: evidence, sabotage, micro-batches, compilation, evaluation and prediction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.models.bert import modeling_bert
from transformers.models.bert.modeling_bert import BertEncoder

from composer_speedups import TorchCompile, Unpadding, apply
from composer_speedups.core.compile_counts import compile_counts
from composer_speedups.core.errors import Refusal
from composer_speedups.packing.encoder import unpadded_encoders, with_counted_rows
from composer_speedups.packing.planning import Packing
from tests.helpers.common import Recorder, batch, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.exhaustive import SCOPES
from tests.helpers.jobs import run
from tests.helpers.masks import masked_batch
from tests.helpers.models import Family, tiny_model
from tests.helpers.unpadded import values
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near


@pytest.mark.pins
def test_the_evidence_counts_layers_and_tokens_and_names_the_attention() -> None:
    technique = Unpadding(8)
    trained([technique], batches=[batch([12, 7, 16, 10]), batch([16, 16, 16, 16])])
    evidence = technique.evidence
    assert (evidence["encoders"], evidence["layers"]) == (1, 2)
    assert "scaled_dot_product" in evidence["attention"]
    counts = ("first_batch_slots", "first_batch_tokens", "first_batch_packed")
    assert [evidence[key] for key in counts] == [64, 45, 48]
    assert evidence["padding_of_the_run"] == round(1 - (45 + 64) / 128, 4)
    assert "note" not in evidence


@pytest.mark.parametrize(
    ("multiple", "lengths", "note"),
    [(8, [8, 8], "no padding to remove"), (32, [16, 1], "lower pad_to_multiple_of"), (8, [16, 1], "")],
)
def test_the_evidence_notes_a_first_batch_that_gains_nothing(multiple: int, lengths: list[int], note: str) -> None:
    technique = Unpadding(multiple)
    trained([technique], batches=[batch(lengths, seed=i) for i in range(2)])
    assert bool(note) == ("note" in technique.evidence)
    assert note in technique.evidence.get("note", "")


class Sabotage(Algorithm):
    """Undo unpadding after INIT; ``change`` says how."""

    def __init__(self, change: str) -> None:
        self.change = change

    def match(self, event: Event, state: State) -> bool:
        return event == Event.FIT_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model: Any = state.model.model
        if self.change == "class":
            model.bert.encoder.__class__ = BertEncoder
        elif self.change == "outputs":
            model.config.output_hidden_states = True
        else:
            model.bert.encoder.layer[1].forward = lambda hidden, *_, **__: hidden


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("class", "the first forward pass ran without its encoder"),
        ("outputs", "the first forward pass ran padded"),
        ("layer", "1 of 2 layers ran on packed tokens"),
    ],
)
def test_a_restored_encoder_is_detected(change: str, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        trained([Unpadding(check="never"), Sabotage(change)])


def test_left_padding_and_holes_stop_a_run_whose_head_or_distances_they_change() -> None:
    left = masked_batch(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), "classification")
    holes = masked_batch(torch.tensor([[1] * 12, [1] * 3 + [0] * 5 + [1] * 4]), "mlm")
    for model, inputs in ((tiny_bert(), left), (tiny_model("modernbert", "mlm"), holes)):
        with pytest.raises(Refusal, match=r"rows begin with padding.*pad on the right, without holes"):
            trained([Unpadding()], model=model, batches=[inputs])
    technique = Unpadding()
    inputs = masked_batch(left["attention_mask"], "mlm")
    trained([technique], model=tiny_model("bert", "mlm"), batches=[inputs])
    assert technique.engaged
    later = Unpadding()
    trained([later], batches=[batch([3, 4]), left])  # a later batch may run padded
    assert later.engaged
    assert later.evidence["micro_batches_kept_padded"] == 1


# transformers has no such head for the others.
class Shorten(Algorithm):
    """An algorithm that changes batches after they were loaded."""

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.batch["attention_mask"][:, 5:] = 0


def test_tokens_are_counted_after_the_last_change_to_the_batch() -> None:
    batches = plain_batches(2)
    expected = copy.deepcopy(batches)
    for changed in expected:
        changed["attention_mask"][:, 5:] = 0
    recorder = Recorder()
    trained([Unpadding(8), Shorten()], batches=batches, callbacks=[recorder])
    assert_near(recorder.losses, train_plainly(tiny_bert(), expected).losses)


def test_a_forward_pass_that_raises_is_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([Unpadding()])
    monkeypatch.setattr(modeling_bert.BertPooler, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer.close()
    assert not _get_current_dispatch_mode_stack()
    assert not unpadded_encoders(trainer.state.model)


def job(*overrides: str, technique: str = "unpadding") -> dict[str, Any]:
    """Run the quickstart for a few seconds with ``technique`` in place of SDPA, and return its report."""
    return run("algorithms.sdpa_attention=null", f"algorithms.{technique}={{}}", "trainer.device=cpu", *overrides)


def test_micro_batches_and_evaluation_never_count_tokens_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = job("run_name=padded", technique="sdpa_attention")
    monkeypatch.setattr(Packing, "_count_and_lay_out", lambda *_: pytest.fail("counted inside the forward pass"))
    for name, size in [("whole", "8"), ("micro", "3")]:
        report = job(f"run_name={name}", f"trainer.microbatch_size={size}")
        assert report["algorithms"]["unpadding"]["engaged"]
        assert report["metrics"] == pytest.approx(padded["metrics"], rel=1e-3)
        assert report["throughput"]["padding_fraction"] == pytest.approx(padded["throughput"]["padding_fraction"])
        saved = report["algorithms"]["unpadding"]["evidence"]["padding_of_the_run"]
        assert 0 < saved < 1


# With gradient checkpointing and torch.compile.


@pytest.mark.parametrize("scope", SCOPES)
def test_after_the_first_batches_nothing_is_recompiled(scope: Any) -> None:
    """Five more batches have other numbers of tokens, rows and slots."""
    reference, model = tiny_bert(), tiny_bert()
    for network in (reference, model):
        network.config.problem_type = "single_label_classification"
    apply(model, [Unpadding(8), TorchCompile(scope=scope, backend="eager")])
    lengths = torch.randint(1, 25, (8, 9), generator=torch.Generator().manual_seed(2)).tolist()
    batches = [batch(rows[: 3 + i % 7], seed=i) for i, rows in enumerate(lengths)]
    assert len({int(inputs["attention_mask"].sum()) // 8 for inputs in batches[3:]}) >= 4
    warm = compile_counts()
    for i, inputs in enumerate(batches):
        if i == 3:
            warm = compile_counts()
        with with_counted_rows(model, inputs, inputs):
            actual = values(model, inputs)
        assert_near(actual, values(reference, inputs), what=f"batch {i}")
    assert warm.graphs
    assert compile_counts().since(warm)[:4] == (0, 0, 0, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_compiled_run_has_one_graph(scope: Any, family: Family) -> None:
    unpadding, compiled = Unpadding(1), TorchCompile(scope=scope, backend="aot_eager")
    batches = [batch([12, 7, 16, 10 - i], seed=i) for i in range(4)]
    model, recorder = tiny_model(family), Recorder()
    model.config.problem_type = "single_label_classification"
    expected = train_plainly(model, batches).losses
    trained([unpadding, compiled], model=model, batches=batches, callbacks=[recorder])
    assert_near(recorder.losses, expected)
    graphs = 2 if family == "modernbert" and scope == "blocks" else 1  # the first block has no norm
    assert [compiled.evidence[key] for key in ("graphs", "graph_breaks", "recompiles")] == [graphs, 0, graphs - 1]
