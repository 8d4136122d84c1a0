"""bitsandbytes' AdamW: parity at 32 bits, which state is 8-bit, cleanup of its managers, loading and paging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from composer_speedups import BnbOptimizer, apply_bnb_optimizer
from composer_speedups.algorithms.bnb_optimizer.bnb_adamw import page_again, paged_tensors
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.optimizer_evidence import state_bits
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import screen
from tests.helpers.common import final_weights, make_trainer, plain_batches, step_alike, tiny_bert, trained
from tests.reference.loop import EPS

EIGHT: dict[str, Any] = {"bits": 8, "min_8bit_size": 1024}  # tiny_bert's matrices have 1024 and 2048 values


def grouped_adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return an AdamW with train.py's parameter groups: no weight decay for vectors."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "lr": 2e-3},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, eps=EPS, weight_decay=0.1, foreach=False)


def test_at_32_bits_it_is_adamw() -> None:
    models = [tiny_bert(), tiny_bert()]
    optimizers: list[Any] = [grouped_adamw(model) for model in models]
    optimizers[1] = apply_bnb_optimizer(models[1], optimizers[1], 32)
    step_alike(models, optimizers)
    torch.testing.assert_close(dict(models[1].named_parameters()), dict(models[0].named_parameters()))


# The state's precision, and errors if it is not the requested one.


def test_state_is_8_bit_except_for_embeddings_and_small_tensors() -> None:
    technique = BnbOptimizer(**EIGHT)
    trainer = trained([technique])
    optimizer = trainer.state.optimizers[0]
    model: Any = trainer.state.model.model
    for name, parameter in model.named_parameters():
        matrix = "embeddings" not in name and parameter.numel() >= 1024
        assert state_bits(optimizer, parameter) == (8 if matrix else 32), name
        assert optimizer.state[parameter]["state2"].dtype == (torch.uint8 if matrix else torch.float32)
    assert technique.evidence["embedding_state_bits"] == [32]
    everything = 8 * sum(p.numel() for p in model.parameters())
    matrices = technique.evidence["values_by_state_bits"]["8"]
    saved = everything - technique.evidence["state_bytes"]
    assert 5.5 * matrices < saved < 6 * matrices  # 6 bytes per value, minus the scales and two look-up tables


def test_a_model_too_small_for_it_is_detected() -> None:
    with pytest.raises(NotEngagedError, match=r"no parameter has 8-bit state; lower min_8bit_size \(4096 now\)"):
        trained([BnbOptimizer(8)])


def test_lost_overrides_are_detected() -> None:
    trainer = make_trainer([BnbOptimizer(**EIGHT)])
    trainer.state.optimizers[0].mng.initialize()
    with pytest.raises(NotEngagedError, match="embeddings have 8-bit state"):
        trainer.fit()
    trainer.close()


def test_embeddings_get_8_bit_state_if_requested() -> None:
    technique = BnbOptimizer(**EIGHT, embeddings_32bit=False)
    trained([technique])
    assert technique.evidence["embedding_state_bits"] == [8, 32]  # the table of two token types is too small


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


# Loading.


def test_other_widths_are_refused() -> None:
    wrong: Any = 4
    with pytest.raises(ValueError, match="bits must be 8 or 32, not 4"):
        BnbOptimizer(wrong)


# Paged memory.


def test_paged_state_needs_a_gpu() -> None:
    with pytest.raises(TechniqueError, match=r"bnb_optimizer: paged optimizer state needs a CUDA GPU"):
        screen([BnbOptimizer(paged=True)], Context(torch.device("cpu")))


@pytest.mark.gpu
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
def test_a_model_too_small_to_page_is_detected() -> None:
    with pytest.raises(NotEngagedError, match="no state tensor is paged"):
        trained([BnbOptimizer(32, paged=True)], gpu=True)
