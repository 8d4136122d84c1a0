"""bf16 and fp16: the dtypes of the forward pass, and refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.models import ComposerClassifier

from composer_speedups import MixedPrecision, apply_mixed_precision
from composer_speedups.core.errors import TechniqueError
from composer_speedups.surgery.instance_forward import restore_forward
from tests.helpers.common import assert_not_engaged, awkward_batches, fit_and_close, make_trainer, tiny_bert, trained
from tests.reference.loop import eval_logits, gradients
from tests.reference.tolerance import assert_near


@pytest.mark.pins
def test_the_function_computes_in_bf16_and_keeps_fp32_weights() -> None:
    reference, model = tiny_bert(), tiny_bert()
    scaler = apply_mixed_precision(model, "bf16")
    assert not scaler.is_enabled()
    batches = awkward_batches()
    assert model(**batches[0]).logits.dtype == torch.bfloat16
    assert_near(eval_logits(model, batches), eval_logits(reference, batches), torch.bfloat16)
    for network in (reference, model):
        network(**batches[0]).loss.backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_near(gradients(model), gradients(reference), torch.bfloat16)


def test_a_second_call_wraps_only_once() -> None:
    model: Any = tiny_bert()
    names = inspect.signature(model.forward).parameters.keys()
    apply_mixed_precision(model)
    first = model.forward
    apply_mixed_precision(model)
    assert model.forward is first
    assert inspect.signature(model.forward).parameters.keys() == names, "HF Trainer drops columns that it lacks"


def test_the_cpu_is_refused_unless_allowed() -> None:
    with pytest.raises(TechniqueError, match=r"bf16 needs a CUDA GPU .* this run is on the cpu"):
        make_trainer([MixedPrecision("bf16")])
    technique = MixedPrecision("bf16", on_unavailable="warn")
    with pytest.warns(UserWarning, match="continuing without mixed_precision"):
        trainer = make_trainer([technique])
    fit_and_close(trainer)
    assert technique.engaged is False
    assert trainer.state.outputs.logits.dtype == torch.float32


@pytest.mark.pins
def test_fp16_needs_a_gpu() -> None:
    with pytest.raises(TechniqueError, match="fp16 needs a CUDA GPU"):
        make_trainer([MixedPrecision("fp16")], device="cpu")
    with pytest.raises(ValueError, match="fp16 needs a CUDA GPU"):
        apply_mixed_precision(tiny_bert(), "fp16")


def test_precision_lost_after_init_is_detected() -> None:
    trainer = make_trainer([MixedPrecision("bf16", allow_cpu=True)])
    restore_forward(trainer.state.model)
    assert_not_engaged(trainer, "returned float32 and no bfloat16")


def test_a_model_with_float32_outputs_is_checked_by_its_linear_layers() -> None:
    class Casting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).float()

    data: Any = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    technique = MixedPrecision("bf16", allow_cpu=True)
    model = ComposerClassifier(Casting(), num_classes=2)
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=4),
        optimizers=torch.optim.AdamW(model.parameters()),
        max_duration="2ba",
        algorithms=[technique],
        device="cpu",
        progress_bar=False,
    )
    fit_and_close(trainer)
    assert technique.evidence["dtypes_seen"] == ["bfloat16", "float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_on_a_gpu_it_sets_composers_precision(dtype: Any) -> None:
    technique = MixedPrecision(dtype)
    trainer = trained([technique], gpu=True)
    assert trainer.state.precision.value == f"amp_{dtype}"
    assert technique.evidence["dtypes_seen"]
    assert ("loss_scale" in technique.evidence) == (dtype == "fp16")
