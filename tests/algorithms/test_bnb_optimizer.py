"""bitsandbytes' AdamW: its managers, paging, and StableEmbedding."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from composer_speedups import BnbOptimizer, LoRA, apply_bnb_optimizer
from composer_speedups.algorithms.bnb_optimizer.functional import page_again, paged_tensors
from composer_speedups.algorithms.bnb_optimizer.stable_embedding import apply_stable_embedding, folded_weights
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.optimizer_evidence import state_bits
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import refuse_conflicts, screen
from composer_speedups.tasks.export import export_model
from tests.helpers.common import (
    assert_not_engaged,
    batch,
    final_weights,
    fit_and_close,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.reference.loop import EPS, eval_logits
from tests.reference.tolerance import assert_near

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes, and it is not installed"
)
EIGHT: dict[str, Any] = {"bits": 8, "min_8bit_size": 1024}  # tiny_bert's matrices have 1024 and 2048 values


def grouped_adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return an AdamW with train.py's parameter groups: no weight decay for vectors."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "lr": 2e-3},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, eps=EPS, weight_decay=0.1, foreach=False)


def test_the_global_managers_are_cleaned_up() -> None:
    from bitsandbytes.functional import GlobalPageManager
    from bitsandbytes.optim import GlobalOptimManager

    manager, pages = GlobalOptimManager.get_instance(), GlobalPageManager.get_instance()

    def contents() -> tuple[int, ...]:
        return len(manager.pid2config), len(manager.module_weight_config_triple), len(pages.paged_tensors)

    before = contents()
    trainer = make_trainer([BnbOptimizer(**EIGHT, stable_embedding=True)])
    trainer.fit()
    assert contents() == before
    trainer.close()


def test_paged_state_needs_a_gpu() -> None:
    with pytest.raises(TechniqueError, match=r"bnb_optimizer: paged optimizer state needs a CUDA GPU"):
        screen([BnbOptimizer(paged=True)], Context(torch.device("cpu")))


@pytest.mark.gpu
@needs_bitsandbytes
@pytest.mark.parametrize("bits", [8, 32])
def test_paged_state_is_paged_again_after_resuming(bits: Any, tmp_path: Path) -> None:
    from bitsandbytes.functional import GlobalPageManager

    before = len(GlobalPageManager.get_instance().paged_tensors)
    config = BertConfig(
        vocab_size=64, hidden_size=384, num_hidden_layers=1, num_attention_heads=2, intermediate_size=768
    )

    def run(**kwargs: Any) -> tuple[dict[str, Tensor], Any]:
        torch.manual_seed(0)
        technique = BnbOptimizer(bits, paged=True)
        trainer = make_trainer(
            [technique], model=BertForSequenceClassification(config), batches=plain_batches(4), gpu=True, **kwargs
        )
        trainer.fit()
        assert len(paged_tensors(trainer.state.optimizers[0])) == technique.evidence["paged_tensors"] > 0
        trainer.close()
        assert len(GlobalPageManager.get_instance().paged_tensors) == before
        return final_weights(trainer), technique.evidence["paged_tensors"]

    uninterrupted, count = run()
    run(save_folder=str(tmp_path), save_interval="2ba", save_filename="ba{batch}.pt", save_latest_filename=None)
    resumed, count_resumed = run(load_path=str(tmp_path / "ba2.pt"))
    assert count_resumed == count
    torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)


@pytest.mark.gpu
@needs_bitsandbytes
def test_paging_again_keeps_the_values() -> None:
    weight = nn.Parameter(torch.randn(512, 256, device="cuda"))
    optimizer: Any = apply_bnb_optimizer(nn.Module(), torch.optim.AdamW([weight], foreach=False), 32, paged=True)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    torch.cuda.synchronize()
    moments = optimizer.state[weight]["state1"].clone()
    optimizer.state[weight]["state1"] = moments.cuda()
    assert page_again(optimizer) == 1
    assert len(paged_tensors(optimizer)) == 2
    torch.testing.assert_close(optimizer.state[weight]["state1"].clone(), moments, rtol=0, atol=0)


@pytest.mark.gpu
@needs_bitsandbytes
def test_a_model_too_small_to_page_is_detected() -> None:
    with pytest.raises(NotEngagedError, match="no state tensor is paged"):
        trained([BnbOptimizer(32, paged=True)], gpu=True)


def test_rows_are_normalised_and_the_weight_is_kept() -> None:
    model = tiny_bert()
    words = model.bert.embeddings.word_embeddings
    weight, before = words.weight, words.weight.detach().clone()
    gain, bias = apply_stable_embedding(model)
    assert apply_stable_embedding(model) == []
    assert model.bert.embeddings.word_embeddings is words
    assert words.weight is weight
    torch.testing.assert_close(weight.detach(), before, rtol=0, atol=0)
    torch.testing.assert_close(gain.detach(), before.std(1, correction=0).mean().expand(32))
    rows = words(torch.arange(1, 9))
    expected = nn.functional.layer_norm(before[1:9], (32,), gain, bias)
    torch.testing.assert_close(rows, expected)


def test_its_norm_joins_the_group_of_the_other_norms() -> None:
    model = tiny_bert()
    technique = BnbOptimizer(**EIGHT, stable_embedding=True)
    trainer = make_trainer([technique], model=model, optimizer=grouped_adamw(model))
    norm = model.bert.embeddings.word_embeddings.norm
    start = norm.weight.detach().clone()
    groups = trainer.state.optimizers[0].param_groups
    assert [any(p is norm.bias for p in g["params"]) for g in groups] == [False, True]
    fit_and_close(trainer)
    assert (norm.weight != start).all()
    assert technique.evidence["stable_embedding"] == ["model.bert.embeddings.word_embeddings"]


def test_a_stable_embedding_that_is_not_trained_is_detected() -> None:
    trainer = make_trainer([BnbOptimizer(**EIGHT, stable_embedding=True)], model=(model := tiny_bert()))
    for parameter in model.bert.embeddings.word_embeddings.norm.parameters():
        parameter.requires_grad_(False)
    assert_not_engaged(trainer, "no stable embedding was trained")


def test_the_export_is_a_stock_model_with_normalised_rows(tmp_path: Path) -> None:
    model = tiny_bert()
    trainer = make_trainer([BnbOptimizer(**EIGHT, stable_embedding=True)], model=model)
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


def masked_lm() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    return BertForMaskedLM._from_config(config, attn_implementation="eager")


def test_a_tied_decoder_is_kept_and_not_folded_in_the_export() -> None:
    model = masked_lm()
    batches = [batch([12, 7, 16, 10], seed=i) for i in range(2)]
    for inputs in batches:
        inputs["labels"] = inputs["input_ids"].clone()
    trainer = trained(
        [BnbOptimizer(**EIGHT, stable_embedding=True)], model=HuggingFaceModel(model, use_logits=True), batches=batches
    )
    words, decoder = model.bert.embeddings.word_embeddings, model.cls.predictions.decoder
    assert decoder.weight is words.weight
    assert state_bits(trainer.state.optimizers[0], words.weight) == 32
    weights = model.state_dict()
    assert folded_weights(model, weights) is weights


def test_refused_models_are_not_changed() -> None:
    model = tiny_bert()
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    optimizer = grouped_adamw(model)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="the word embedding is frozen"):
        apply_bnb_optimizer(model, optimizer, stable_embedding=True)
    assert type(model.bert.embeddings.word_embeddings) is nn.Embedding
    assert optimizer.state_dict() == before
    two = nn.ModuleList([nn.Embedding(4, 4), nn.Embedding(4, 4)])
    with pytest.raises(ValueError, match="the model has 2 embeddings and no get_input_embeddings"):
        apply_stable_embedding(two)


def test_only_a_stable_embedding_conflicts_with_lora() -> None:
    refuse_conflicts([LoRA(), BnbOptimizer()])
    with pytest.raises(TechniqueError, match=r"conflicts with .*: lora freezes the word embedding, and a stable em"):
        refuse_conflicts([LoRA(), BnbOptimizer(stable_embedding=True)])
