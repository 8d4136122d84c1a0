"""Unpadded ModernBERT, as far as it differs from other families: windows, positions and pooling heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composer_speedups import Unpadding, apply_torch_compile
from composer_speedups.core.compile_counts import compile_counts
from composer_speedups.core.errors import NotEngagedError
from tests.helpers.common import batch, trained
from tests.helpers.masks import draw_mask, masked_batch
from tests.helpers.models import tiny_model
from tests.helpers.unpadded import pair, values
from tests.reference.loop import counted
from tests.reference.tolerance import assert_near


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("kind", ["right padding", "left padding"])
def test_both_poolings_match_the_untouched_model(pooling: str, kind: str) -> None:
    reference, model, encoder = pair("modernbert", classifier_pooling=pooling)
    for seed in range(8):
        mask = draw_mask(kind, seed)
        inputs = masked_batch(mask, "classification", seed=seed)
        assert_near(values(model, inputs), values(reference, inputs), what=f"seed {seed}")
        begins_with_padding = bool((mask[:, 0] == 0).any())
        assert encoder.ran == ("padded" if pooling == "cls" and begins_with_padding else "unpadded")


def test_rows_with_holes_wider_than_a_window_run_padded() -> None:
    mask = torch.tensor([[1] * 12, [1] * 3 + [0] * 5 + [1] * 4])
    inputs = masked_batch(mask, "mlm")
    logits = []
    for width, way in [(8, "padded"), (24, "unpadded")]:
        reference, model, encoder = pair("modernbert", "mlm", local_attention=width)
        assert encoder.packing.count(mask) == [12, -1 if way == "padded" else 7]
        assert_near(values(model, inputs), values(reference, inputs))
        assert encoder.ran == way
        logits.append(reference(**inputs).logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_shared_positions_inputs_embeds_and_masks_per_layer_type() -> None:
    reference, model, encoder = pair("modernbert", "mlm")
    inputs = masked_batch(draw_mask("right padding", 3), "mlm")
    shared = {**inputs, "position_ids": torch.arange(inputs["input_ids"].shape[1]).flip(0)[None]}
    assert_near(values(model, shared), values(reference, shared))
    typed = {**inputs, "token_type_ids": inputs["attention_mask"].clone()}  # of BERT's tokenizer; ModernBERT has none
    assert_near(values(model, typed), values(reference, typed))
    embedded = []
    for network in (reference, model):
        given = network.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        network(**{k: v for k, v in inputs.items() if k != "input_ids"}, inputs_embeds=given).loss.backward()
        embedded.append(given.grad)
    assert_near([embedded[1]], [embedded[0]])
    assert encoder.ran == "unpadded"
    width = inputs["input_ids"].shape[1]
    masks = dict.fromkeys(["full_attention", "sliding_attention"], torch.zeros(1, 1, width, width))
    both = {"input_ids": inputs["input_ids"], "attention_mask": masks}
    assert_near([model(**both).logits], [reference(**both).logits])
    assert encoder.ran == "padded"
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model()


def test_a_layer_attends_as_its_own_kind() -> None:
    reference, model, encoder = pair("modernbert")
    inputs = masked_batch(draw_mask("right padding", 3), "classification")
    values(model, inputs)
    for network in (reference, model):
        network.model.layers[1] = network.model.layers[0]
    assert_near(values(model, inputs), values(reference, inputs))
    assert encoder.ran == "unpadded"


def test_the_saved_folder_equals_the_stock_models(tmp_path: Path) -> None:
    saved = []
    for name, network in zip(("stock", "unpadded"), pair("modernbert")[:2], strict=True):
        network.save_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        saved.append((config, load_file(tmp_path / name / "model.safetensors")))
    assert saved[0][0] == saved[1][0]
    assert saved[0][0]["architectures"] == ["ModernBertForSequenceClassification"]
    torch.testing.assert_close(saved[1][1], saved[0][1], rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_compiled_graphs_accept_every_number_of_tokens(scope: Any) -> None:
    graphs = 1 if scope == "model" else 2  # the first block has no norm
    reference, model, _ = pair("modernbert")
    for network in (reference, model):
        network.config.problem_type = "single_label_classification"
    apply_torch_compile(model, scope, backend="aot_eager")
    before = compile_counts()
    for length in (16, 11, 8, 6):
        inputs = batch([12, 7, 16, length], seed=length)
        counted(model, inputs["attention_mask"])
        assert_near(values(model, inputs), values(reference, inputs))
    since = compile_counts().since(before)
    assert (since.graphs, since.breaks, since.recompiles, since.failed) == (graphs, 0, graphs - 1, 0)
    counted(model, batch([12, 8, 16, 5])["attention_mask"])
    with pytest.raises(RuntimeError, match="differs from the planned one"):
        model(**inputs)


def test_holes_in_the_first_batch_stop_a_run() -> None:
    mask = torch.tensor([[1] * 12, [1] * 3 + [0] * 5 + [1] * 4])
    with pytest.raises(NotEngagedError, match=r"have holes, which change the distances.*without holes"):
        trained([Unpadding()], model=tiny_model("modernbert", "mlm"), batches=[masked_batch(mask, "mlm")])
