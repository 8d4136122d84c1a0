"""bnb_optimizer's stable embedding: a norm in the word embedding that is trained, and folded into the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from torch import nn
from torch.optim import AdamW
from transformers import BertForMaskedLM, BertForSequenceClassification

from composer_speedups import LayerFreezing, LoRA
from composer_speedups.core.engaging import check
from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run
from composer_speedups.tasks.export import export_model
from tests.algorithms.optimizers.cases import technique
from tests.helpers.common import batch, fit_and_close, make_trainer, plain_batches, tiny_bert, tiny_config, trained
from tests.reference.loop import eval_logits
from tests.reference.tolerance import assert_near

pytest.importorskip("bitsandbytes", reason="a stable embedding derives from bitsandbytes' StableEmbedding")

from composer_speedups.algorithms.optimizers.stable_embedding import folded_weights, make_stable_embedding


def stable() -> Any:
    return technique("bnb_optimizer", min_8bit_size=1024, stable_embedding=True)


def test_rows_are_normalised_and_the_weight_is_kept() -> None:
    model = tiny_bert()
    words = model.bert.embeddings.word_embeddings
    weight, before = words.weight, words.weight.detach().clone()
    gain, bias = make_stable_embedding(model)
    assert make_stable_embedding(model) == []
    assert model.bert.embeddings.word_embeddings is words
    assert words.weight is weight
    torch.testing.assert_close(weight.detach(), before, rtol=0, atol=0)
    torch.testing.assert_close(gain.detach(), before.std(1, correction=0).mean().expand(32))
    rows = words(torch.arange(1, 9))
    torch.testing.assert_close(rows, nn.functional.layer_norm(before[1:9], (32,), gain, bias))


def test_its_norm_is_trained_in_the_group_of_the_other_norms() -> None:
    model, built = tiny_bert(), stable()
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if (p.ndim > 1) is matrix]} for matrix in (True, False)]
    trainer = make_trainer([built], model=model, optimizer=AdamW(groups, lr=1e-3, foreach=False))
    norm = model.bert.embeddings.word_embeddings.norm
    start = norm.weight.detach().clone()
    groups = trainer.state.optimizers[0].param_groups
    assert [any(p is norm.bias for p in g["params"]) for g in groups] == [False, True]
    fit_and_close(trainer)
    assert (norm.weight != start).all()
    assert built.evidence["stable_embedding"] == ["model.bert.embeddings.word_embeddings"]


def test_the_export_is_a_stock_model_with_normalised_rows(tmp_path: Path) -> None:
    model = tiny_bert()
    trainer = make_trainer([stable()], model=model)
    trainer.fit()
    export_model(trainer.state, tmp_path / "export")
    trainer.close()
    loaded: Any = BertForSequenceClassification.from_pretrained(
        tmp_path / "export", attn_implementation="eager", output_loading_info=True
    )
    stock, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batches = plain_batches(2)
    assert_near(eval_logits(stock, batches), eval_logits(model, batches), what="logits of the export")
    assert "bert.embeddings.word_embeddings.norm.weight" in model.state_dict(), "the model itself is not changed"


def test_a_tied_decoder_is_kept_and_not_folded_in_the_export() -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM._from_config(tiny_config(), attn_implementation="eager")
    batches = [batch([12, 7, 16, 10], seed=i) for i in range(2)]
    for inputs in batches:
        inputs["labels"] = inputs["input_ids"].clone()
    trained([built := stable()], model=HuggingFaceModel(model, use_logits=True), batches=batches)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert built.evidence["stable_embedding"]
    weights = model.state_dict()
    assert folded_weights(model, weights) is weights


def test_a_frozen_embedding_and_techniques_that_freeze_it_are_refused() -> None:
    model = tiny_bert()
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    with pytest.raises(Refusal, match="the word embedding is frozen, and a stable embedding must be trained"):
        make_trainer([stable()], model=model)
    assert type(model.bert.embeddings.word_embeddings) is nn.Embedding
    check([LoRA(), technique("bnb_optimizer")], Run(torch.device("cpu")))
    for other in (LoRA(), LayerFreezing()):
        with pytest.raises(Refusal, match=rf"conflicts with {other.name}, which freezes the word embedding"):
            check([other, stable()], Run(torch.device("cpu")))
