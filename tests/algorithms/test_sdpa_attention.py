"""SDPA: the kernel that ran, refusals, restored attention, and on a GPU every kernel on four families.

tests/families/test_family_techniques.py compares it with eager attention on every family, head and kind of input.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DebertaV2Config, MPNetConfig
from transformers.models.auto import AutoModelForSequenceClassification
from transformers.models.bert import modeling_bert

from composer_speedups import SDPAAttention, TorchCompile, apply, untouched
from composer_speedups.core.errors import Refusal
from tests.helpers.common import (
    VOCABULARY,
    Recorder,
    assert_not_engaged,
    batch,
    fit_and_close,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.models import FAMILIES, HEADS, Family, Head, fit_batches, tiny_model
from tests.reference.loop import eval_logits, train_plainly


@pytest.mark.pins
@pytest.mark.parametrize(("backend", "kernel"), [("auto", "flash_attention"), ("math", "attention_math")])
def test_a_run_names_its_kernel_and_in_compiled_code_where_it_was_seen(backend: Any, kernel: str) -> None:
    trained([technique := SDPAAttention(backend)])
    assert technique.evidence["implementation_before"] == "eager"
    assert technique.evidence["kernel"].startswith(f"scaled_dot_product_{kernel}")
    trained([technique, TorchCompile("model", backend="aot_eager")], batches=plain_batches(1))
    assert technique.engaged
    assert technique.evidence["kernel_seen_in"] in ("compiled code", "forward pass")


@pytest.mark.parametrize(("config", "backend"), [(DebertaV2Config, "auto"), (MPNetConfig, "math")])
def test_models_without_sdpa_are_refused_and_none_is_changed(config: Any, backend: Any) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    settings = config(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
    model, bert = AutoModelForSequenceClassification.from_config(settings), tiny_bert()
    with pytest.raises(Refusal, match=f"^sdpa_attention: {type(model).__name__} does not support"):
        apply(nn.ModuleDict({"bert": bert, "other": model}), [SDPAAttention(backend)])
    assert bert.config._attn_implementation == model.config._attn_implementation == "eager"


def test_other_models_and_flash_on_a_cpu_are_refused() -> None:
    with pytest.raises(Refusal, match="the model has no Hugging Face model"):
        apply(nn.Linear(2, 2), [SDPAAttention()])
    with pytest.raises(Refusal, match="the flash kernel needs a CUDA GPU"):
        make_trainer([SDPAAttention("flash")])


def test_attention_restored_or_ignored_after_init_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([SDPAAttention()])
    trainer.state.model.model.set_attn_implementation("eager")  # type: ignore[union-attr, operator]
    assert_not_engaged(trainer, "the model's attention is eager")

    class AlwaysEager:
        def get_interface(self, *_: Any, eager: Any = modeling_bert.eager_attention_forward) -> Any:
            return eager

    trainer = make_trainer([SDPAAttention()])
    monkeypatch.setattr(modeling_bert, "ALL_ATTENTION_FUNCTIONS", AlwaysEager())
    assert_not_engaged(trainer, "ran no SDPA kernel")


def test_untouched_computes_eager_attention_and_undoing_restores_it() -> None:
    model, reference = tiny_bert().eval(), tiny_bert().eval()
    reference.set_attn_implementation("sdpa")
    applied, inputs = apply(model, [SDPAAttention()]), plain_batches(1)[0]
    with untouched(model):
        torch.testing.assert_close(model(**inputs).logits, tiny_bert().eval()(**inputs).logits, rtol=0, atol=0)
    torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits, rtol=0, atol=0)
    applied.undo()
    assert model.config._attn_implementation == "eager"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "head"), others_exhaustive(product(FAMILIES, HEADS), lambda model: model[0] == "bert")
)
@pytest.mark.parametrize("backend", ["efficient", "cudnn", "math", "flash"])
def test_every_kernel_runs_on_every_family(family: Family, head: Head, backend: Any) -> None:
    """The bf16 error of logits and first gradients is at most 1.5 times eager attention's. Flash accepts no padding.

    If the input of a ReLU (as in DistilBERT's head) rounds across zero, gradients change a lot, so one of three
    models must pass.
    """
    lengths = [[32] * 4] * 2 if backend == "flash" else [[32, 17, 5, 32], [9, 30, 32, 1]]
    excess = []
    for seed in range(3):
        exact, technique = tiny_model(family, head, seed=seed), SDPAAttention(backend)
        batches = fit_batches(exact, [batch(lengths_of_rows, 32, seed=i) for i, lengths_of_rows in enumerate(lengths)])
        expected = [*eval_logits(exact, batches), *train_plainly(exact, batches).first_gradients.values()]
        by_kernel, by_eager = (
            _distance(_in_bf16(tiny_model(family, head, seed=seed), batches, t), expected) for t in ([technique], [])
        )
        excess.append(by_kernel - 1.5 * by_eager)
        assert by_eager < 0.05
        assert backend in technique.evidence["kernel"].split("_")
    assert min(excess) < 2e-3, excess


def _in_bf16(model: Any, batches: list[Any], techniques: list[Any]) -> list[torch.Tensor]:
    """Return the logits of every batch, then the gradients of the first batch."""
    recorder, bf16 = Recorder(), {"gpu": True, "precision": "amp_bf16"}
    trainer = make_trainer(techniques, model=model, batches=batches, callbacks=[recorder], **bf16)
    on_gpu = [{name: value.cuda() for name, value in inputs.items()} for inputs in batches]
    with torch.autocast("cuda", torch.bfloat16):
        logits = eval_logits(trainer.state.model.model, on_gpu)
    fit_and_close(trainer)
    return [x.cpu() for x in (*logits, *recorder.first_gradients.values())]


def _distance(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the relative error, as norms over all tensors together."""
    one, other = (torch.cat([x.flatten() for x in tensors]) for tensors in (actual, expected))
    return float((one - other).norm() / other.norm())
