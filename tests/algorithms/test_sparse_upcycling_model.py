"""A model with experts: its optimizer, copies, FLOPs and export, and wrong settings."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from composer_speedups import SparseUpcycling, apply_sparse_upcycling, load_balancing_loss, load_sparse_upcycling
from composer_speedups.algorithms.sparse_upcycling.loss import sparse_layers
from composer_speedups.core.errors import ConfigError, TechniqueError
from composer_speedups.families.flops import batch_lengths, training_flops
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import _loaded
from composer_speedups.train.config.schema import ModelConfig
from tests.algorithms.test_sparse_upcycling import balance_of, perturb_experts, upcycled
from tests.helpers.common import awkward_batches, batch, make_trainer, tiny_bert
from tests.helpers.models import fit_batches, real_logits, tiny_model
from tests.reference.loop import eval_logits
from tests.reference.tolerance import assert_near


def test_new_parameters_join_the_groups_of_the_replaced_ones() -> None:
    model = tiny_bert()
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [(n, p) for n, p in named if p.ndim > 1], "lr": 0.5},
            {"params": [(n, p) for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.1,
    )
    groups = list(optimizer.param_groups)
    dense = model.bert.encoder.layer[1]
    old = [*dense.intermediate.dense.parameters(), *dense.output.dense.parameters()]
    optimizer.state[old[0]] = {"step": torch.tensor(1.0)}
    apply_sparse_upcycling(model, optimizer, experts=3)
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    assert not {id(p) for g in groups for p in g["params"]} & set(map(id, old))
    assert old[0] not in optimizer.state
    assert sorted(n for g in groups for n in g["param_names"]) == sorted(n for n, _ in model.named_parameters())
    for group in groups:
        by_name = dict(model.named_parameters())
        assert [id(by_name[n]) for n in group["param_names"]] == [id(p) for p in group["params"]]
        decays = group["weight_decay"] > 0
        assert all((p.ndim > 1) == decays for p in group["params"])
    assert any("router" in n for n in groups[0]["param_names"])


def test_experts_keep_mode_dtype_and_frozen_parameters() -> None:
    model = tiny_bert().to(torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.1.output" not in name)
    apply_sparse_upcycling(model)
    (layer,) = sparse_layers(model)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert not any(m.training for m in layer.modules())
    assert [p.requires_grad for e in layer.experts for p in e.parameters()] == [True, True, False, False] * 4
    assert layer.router.weight.requires_grad
    assert layer(torch.ones(1, 3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_model_can_be_copied_and_pickled_after_a_step() -> None:
    model = upcycled()
    model.train()(**batch([5, 7])).loss.backward()
    again = copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    model.train()(**batch([9, 2]))
    with pytest.raises(ValueError, match="recorded nothing"):
        load_balancing_loss(again)
    assert balance_of(again, batch([5, 7])) != pytest.approx(float(load_balancing_loss(model).detach()), rel=1e-6)


def test_evaluation_has_no_load_balancing_loss() -> None:
    model = upcycled()
    model.train()(**batch([5]))
    model.eval()(**batch([5]))
    with pytest.raises(ValueError, match="training mode"):
        load_balancing_loss(model)


@pytest.mark.parametrize("every", [1, 2])
def test_flops_match_torchs_counter(every: int) -> None:
    model = upcycled(every=every, experts=3, top_k=3)
    full = batch([16, 16, 16, 16])
    with FlopCounterMode(display=False) as counter:
        model(**full).loss.backward()
    lengths = batch_lengths(full)
    assert lengths is not None
    assert training_flops(model.config, lengths, "classification") == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_an_export_can_be_loaded_but_not_as_a_stock_model(tmp_path: Path) -> None:
    model = upcycled(experts=3).eval()
    perturb_experts(model)
    model.save_pretrained(tmp_path)
    again = load_sparse_upcycling(tmp_path)
    torch.testing.assert_close(dict(again.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
    assert_near(eval_logits(again, awkward_batches()), eval_logits(model, awkward_batches()), what="logits")
    with pytest.raises(ConfigError, match=r"lacks .* encoder weights, bert\.encoder\.layer\.0\.intermediate"):
        _loaded(AutoModelForSequenceClassification, str(tmp_path), ModelConfig(), Classification(), {})
    tiny_bert().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="does not have an exported model with experts"):
        load_sparse_upcycling(tmp_path / "dense")


def test_an_exported_masked_lm_with_tied_embeddings_can_be_loaded(tmp_path: Path) -> None:
    model = tiny_model("roberta", "mlm")
    batches = fit_batches(model, awkward_batches())
    apply_sparse_upcycling(model)
    model.save_pretrained(tmp_path)
    again: Any = load_sparse_upcycling(tmp_path, AutoModelForMaskedLM)
    assert again.lm_head.decoder.weight is again.get_input_embeddings().weight
    assert_near(real_logits(again, batches), real_logits(model, batches), what="logits")


def test_wrong_settings_and_models_are_refused() -> None:
    for settings, message in [
        ({"experts": 1}, "experts must be 2 to 1024"),
        ({"every": 0}, "every must be at least 1"),
        ({"top_k": 1}, "top_k must be 2 to"),
        ({"top_k": 5}, "top_k must be 2 to experts=4, not 5"),
        ({"every": 3}, "has 2 feed-forward layers .* every=3 selects none"),
    ]:
        with pytest.raises(ValueError, match=message):
            apply_sparse_upcycling(tiny_bert(), **settings)
    with pytest.raises(ValueError, match="load_balancing must be at least 0, not -1"):
        SparseUpcycling(load_balancing=-1)
    with pytest.raises(ValueError, match=r"already has layers of experts with experts=4.*; to use experts=2"):
        apply_sparse_upcycling(upcycled(), experts=2)
    with pytest.raises(ValueError, match="no Hugging Face model"):
        apply_sparse_upcycling(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no experts"):
        load_balancing_loss(tiny_bert())
    chunked = tiny_bert()
    chunked.config.chunk_size_feed_forward = 4
    with pytest.raises(ValueError, match="chunk_size_feed_forward to 0"):
        apply_sparse_upcycling(chunked)
    with pytest.raises(TechniqueError, match=r"sparse_upcycling: .*every=5 selects none of them; remove it"):
        make_trainer([SparseUpcycling(every=5)])
