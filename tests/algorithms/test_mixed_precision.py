"""bf16 and fp16: the dtypes of the forward pass, and refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from composer_speedups import MixedPrecision, apply
from composer_speedups.core.errors import Refusal
from composer_speedups.core.reversible import restore_forward
from tests.helpers.common import assert_not_engaged, awkward_batches, make_trainer, tiny_bert, trained
from tests.reference.loop import eval_logits, gradients
from tests.reference.tolerance import assert_near


@pytest.mark.pins
def test_another_loop_computes_in_bf16_and_keeps_fp32_weights() -> None:
    reference, model = tiny_bert(), tiny_bert()
    names = inspect.signature(model.forward).parameters.keys()
    applied = apply(model, [MixedPrecision("bf16", allow_cpu=True)])
    assert inspect.signature(model.forward).parameters.keys() == names, "HF Trainer drops columns that it lacks"
    batches = awkward_batches()
    assert model(**batches[0]).logits.dtype == torch.bfloat16
    assert_near(eval_logits(model, batches), eval_logits(reference, batches), torch.bfloat16)
    for network in (reference, model):
        network(**batches[0]).loss.backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_near(gradients(model), gradients(reference), torch.bfloat16)
    applied.undo()
    assert model(**batches[0]).logits.dtype == torch.float32


def test_the_cpu_and_16_bit_weights_are_refused() -> None:
    """Frozen ones are not."""
    frozen = tiny_bert()
    frozen.bert.to(torch.bfloat16).requires_grad_(False)
    make_trainer([MixedPrecision(allow_cpu=True)], model=frozen).close()
    with pytest.raises(Refusal, match=r"bf16 needs a CUDA GPU .* this run is on the cpu"):
        make_trainer([MixedPrecision("bf16")])
    with pytest.raises(Refusal, match="fp16 needs a CUDA GPU"):
        make_trainer([MixedPrecision("fp16")])
    with pytest.raises(Refusal, match=r"trains float32 weights, and .* is bfloat16; load the model with dtype"):
        make_trainer([MixedPrecision(allow_cpu=True)], model=tiny_bert().bfloat16())


def test_precision_lost_after_init_is_detected() -> None:
    trainer = make_trainer([MixedPrecision("bf16", allow_cpu=True)])
    restore_forward(trainer.state.model)
    assert_not_engaged(trainer, "were float32, and none was bfloat16")


def test_a_model_with_float32_outputs_is_seen_by_its_matmuls() -> None:
    class Casting(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).float()

    model: Any = tiny_bert()
    model.classifier = Casting(32, 2)
    technique = MixedPrecision("bf16", allow_cpu=True)
    trained([technique], model=model)
    assert technique.evidence["dtypes_seen"] == ["bfloat16", "float32"]
