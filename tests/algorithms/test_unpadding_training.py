"""Unpadding in a Trainer: evidence, sabotage, micro-batches and evaluation."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from composer.core import Algorithm, Event, State
from composer.devices import DeviceCPU
from composer.loggers import Logger
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AutoModelForQuestionAnswering
from transformers.models.bert import modeling_bert
from transformers.models.bert.modeling_bert import BertEncoder

from composer_speedups import TorchCompile, Unpadding
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.algorithms.unpadding.evidence import FirstForward, _probe_attention
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.planning import Packing
from tests.helpers.common import (
    Recorder,
    batch,
    data_spec,
    final_weights,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.exhaustive import family_params
from tests.helpers.jobs import run
from tests.helpers.masks import masked_batch
from tests.helpers.models import UNPADDED, Family, tiny_model
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def fit(technique: Unpadding, **kwargs: Any) -> Any:
    trainer = make_trainer([technique], **kwargs)
    try:
        trainer.fit()
    finally:
        trainer.close()
    return trainer


@pytest.mark.pins
def test_the_evidence_counts_layers_and_tokens_and_names_the_attention() -> None:
    technique = Unpadding(8)
    batches = [batch([12, 7, 16, 10]), batch([16, 16, 16, 16])]
    fit(technique, batches=batches)
    evidence = technique.evidence
    assert (evidence["encoders"], evidence["layers"]) == (1, 2)
    assert "scaled_dot_product" in evidence["attention"]
    assert evidence["attention_seen_in"] == "forward pass"
    counts = ("first_batch_slots", "first_batch_tokens", "first_batch_packed")
    assert [evidence[key] for key in counts] == [64, 45, 48]
    assert evidence["padding_of_the_run"] == round(1 - (45 + 64) / 128, 4)
    assert "note" not in evidence


def test_the_evidence_notes_a_run_without_padding() -> None:
    technique = Unpadding()
    fit(technique, batches=[batch([8, 8], seed=i) for i in range(2)])
    assert technique.evidence["note"] == "the first batch has no padding to remove"
    assert technique.evidence["padding_of_the_run"] == 0


@pytest.mark.parametrize(("multiple", "noted"), [(32, True), (8, False)])
def test_the_evidence_notes_a_batch_that_packing_does_not_make_smaller(multiple: int, noted: bool) -> None:
    technique = Unpadding(multiple)
    fit(technique, batches=[batch([16, 1], seed=i) for i in range(2)])
    assert [technique.evidence[f"first_batch_{what}"] for what in ("slots", "packed")] == [32, 32 if noted else 24]
    assert ("lower pad_to_multiple_of" in technique.evidence.get("note", "")) is noted


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
        elif self.change == "layer":
            layer = model.bert.encoder.layer[1]
            original = layer.forward
            layer.forward = lambda hidden, *args, **kwargs: original(hidden, *args, **kwargs)
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "layout"}),
                with_kwargs=True,
                prepend=True,
            )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("class", "the first forward pass ran without its encoder"),
        ("outputs", "the first forward pass ran padded"),
        ("layer", "1 of 2 layers ran on packed tokens"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_restored_encoder_is_detected(change: str, reason: str, compiled: bool) -> None:
    if compiled and change in ("layer", "outputs"):
        pytest.skip("compiled layers are not watched; output hooks break the graph")
    others = [TorchCompile(backend="aot_eager")] if compiled else []
    with pytest.raises(NotEngagedError, match=reason):
        trained([Unpadding(), Sabotage(change), *others])


def test_left_padding_stops_a_classifier_but_not_a_masked_lm() -> None:
    left = masked_batch(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), "classification")
    with pytest.raises(NotEngagedError, match=r"rows begin with padding.*pad on the right"):
        fit(Unpadding(), batches=[left])
    technique = Unpadding()
    fit(technique, model=tiny_model("bert", "mlm"), batches=[masked_batch(left["attention_mask"], "mlm")])
    assert technique.engaged
    later = Unpadding()
    fit(later, batches=[batch([3, 4]), left])  # a later batch may run padded
    assert later.engaged
    assert later.evidence["micro_batches_kept_padded"] == 1


# transformers has no such head for the others.
ANSWERING = [family for family in UNPADDED if family not in ("esm", "eurobert", "nomic_bert")]


@pytest.mark.parametrize("family", family_params(ANSWERING))
def test_question_answering_is_refused_and_not_changed(family: Family) -> None:
    model = AutoModelForQuestionAnswering.from_config(tiny_model(family).config)
    encoder = next(type(m) for m in model.modules() if any(isinstance(c, torch.nn.ModuleList) for c in m.children()))
    with pytest.raises(TechniqueError) as error:
        make_trainer([Unpadding()], model=model)
    head = type(model).__name__
    assert str(error.value) == (
        f"unpadding: does not support {head}, whose loss includes padding positions; remove it for this model"
    )
    assert any(type(m) is encoder for m in model.modules())
    assert not unpadded_encoders(model)


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
    (encoder,) = unpadded_encoders(trainer.state.model)
    trainer.close()
    assert not _get_current_dispatch_mode_stack()
    assert "planned" not in vars(encoder)
    assert not any(layer._forward_pre_hooks for layer in encoder.layer)
    assert not unpadded_encoders(trainer.state.model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_compiled_run_has_one_graph_and_evidence_from_a_probe(scope: Any) -> None:
    unpadding, compiled = Unpadding(1), TorchCompile(scope=scope, backend="aot_eager")
    batches = [batch([12, 7, 16, 10 - i], seed=i) for i in range(4)]
    model, recorder = tiny_bert(), Recorder()
    model.config.problem_type = "single_label_classification"
    expected = train_plainly(model, batches).losses
    trained([unpadding, compiled], model=model, batches=batches, callbacks=[recorder])
    assert_near(recorder.losses, expected)
    assert unpadding.evidence["attention_seen_in"] == "probe"
    assert "scaled_dot_product" in unpadding.evidence["attention"]
    counted = [compiled.evidence[key] for key in ("graphs", "graph_breaks", "recompiles")]
    assert counted == [1, 0, 0]


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


def test_the_evidence_is_of_the_first_forward_pass() -> None:
    first, model = FirstForward(), tiny_bert()
    unpad(model)
    trainer = make_trainer(model=model)
    encoders = unpadded_encoders(trainer.state.model)
    with ExitStack() as watching:
        first.watch(trainer.state, encoders, watching)
        model(**batch([5, 9]))
    first.stop()
    evidence = first.evidence()
    encoders[0].ran = "padded"  # in a later batch
    first.watch(trainer.state, encoders, ExitStack())
    first.stop()
    assert first.failure() is None
    assert first.evidence() == evidence
    trainer.close()


@pytest.mark.parametrize("family", [*family_params(UNPADDED), "t5"])
def test_the_probe_names_the_attention_operator(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    if family in ("mpnet", "t5"):  # flash attention does not support their position bias
        monkeypatch.setattr("composer_speedups.packing.attention.supports_flash_attention", lambda *_: True)
    model = tiny_model(family, "tokens") if family == "t5" else tiny_model(family)
    unpad(model)
    trainer = make_trainer(model=model)
    (encoder,) = unpadded_encoders(trainer.state.model)
    assert any("attention" in operator for operator in _probe_attention(trainer.state, encoder))
    trainer.close()


def test_a_patch_of_the_devices_method_that_was_there_before_remains() -> None:
    device, seen = DeviceCPU(), []
    patch = device.batch_to_device

    def counted(batch: Any) -> Any:
        seen.append(batch)
        return patch(batch)

    device.batch_to_device = counted  # type: ignore[method-assign]
    fit(Unpadding(8), device=device, batches=plain_batches(2))
    assert vars(device)["batch_to_device"] is counted
    assert len(seen) == 2
    untouched = DeviceCPU()
    fit(Unpadding(8), device=untouched, batches=plain_batches(1))
    assert "batch_to_device" not in vars(untouched)


def test_masks_that_were_made_in_inference_mode() -> None:
    """torch does not count their changes in place, so they are counted in the forward pass."""

    def fetched(batch: Any) -> Any:
        with torch.inference_mode():
            return {**batch, "attention_mask": batch["attention_mask"].clone()}

    weights = []
    for techniques in ([Unpadding(8)], []):
        data = data_spec(plain_batches(2), collate_fn=fetched)
        trainer = trained(techniques, train_dataloader=data, batches=plain_batches(2))
        weights.append(final_weights(trainer))
    assert_near(*weights)
