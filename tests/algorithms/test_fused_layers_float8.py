"""fused_layers with 8-bit matmuls, tested without a GPU: settings, refusals and checkpoints.

tests/kernels/test_kernels.py compares the kernels and the layer with plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer_speedups import FusedLayers, Unpadding
from composer_speedups.algorithms.fused_layers import fusing
from composer_speedups.algorithms.fused_layers.fusing import float8_scales, fuse, load_float8_scales
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.engaging import engage
from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run
from composer_speedups.core.stock import model_differences
from tests.helpers.common import batch, make_trainer, plain_batches, tiny_bert, tiny_config, trained
from tests.helpers.models import tiny_model
from tests.reference.tolerance import assert_near


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check for a GPU with 8-bit matmuls; on a CPU the layers run in torch's operators."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    monkeypatch.setattr(fusing, "check_float8", lambda layers: None)


def in_float8(model: Any) -> Any:
    unpad(model)
    fuse(model, precision="fp8")
    return model


def test_without_a_gpu_it_is_refused_in_eight_bits() -> None:
    with pytest.raises(ValueError, match=r"needs a CUDA GPU of compute capability 8.9 or newer, .* is on the cpu"):
        in_float8(tiny_bert())
    with pytest.raises(Refusal, match=r"precision: fp8 needs a CUDA GPU of compute capability 8\.9 or newer"):
        make_trainer([FusedLayers(precision="fp8"), Unpadding()])


def test_widths_that_are_not_multiples_of_16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "unsuitable_device", lambda *_: None)
    model = type(tiny_bert())(tiny_config().from_dict({**tiny_config().to_dict(), "intermediate_size": 72}))
    with pytest.raises(ValueError, match="multiples of 16, and the layers have 32 and 72 units"):
        in_float8(model)


def test_scales_are_a_buffer_outside_the_state_dict(on_any_device: None) -> None:
    stock, model = tiny_bert(), in_float8(tiny_bert())
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert [name for name, _ in model.named_buffers() if "float8" in name] == [
        f"bert.encoder.layer.{i}.float8_scales" for i in range(2)
    ]
    assert float8_scales(model).keys() == {"bert.encoder.layer.0", "bert.encoder.layer.1"}
    assert model_differences(model) == []
    inputs = batch([5, 9])
    assert_near([model(**inputs).logits], [stock(**inputs).logits])
    model.to(torch.bfloat16)
    assert {layer.float8_scales.dtype for layer in model.bert.encoder.layer} == {torch.int32}


def test_a_runs_checkpoint_has_the_scales_of_each_rank(on_any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, technique = tiny_bert(), FusedLayers(precision="fp8", check="never")
    monkeypatch.setattr(FusedLayers, "needs", lambda self, run: ())
    run = Run(torch.device("cpu"), model=model)
    engage(run, [technique, Unpadding(check="never")])
    model.bert.encoder.layer[0].float8_scales[3, 8] = 12345
    held = technique.state(run)
    assert held["float8_scales"][0]["bert.encoder.layer.0"][3][8] == 12345
    model.bert.encoder.layer[0].float8_scales.zero_()
    technique.load_state(run, held)
    assert float8_scales(model) == held["float8_scales"][0]
    ranks = [held["float8_scales"][0], {name: [[7] * 64] * 12 for name in held["float8_scales"][0]}]
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    technique.load_state(run, {"float8_scales": ranks})
    assert float8_scales(model) == ranks[1]
    with pytest.raises(Refusal, match="have different 8-bit layers"):
        technique.load_state(run, {"float8_scales": [{}]})
    run.undo.close()
    assert FusedLayers().state(run) == {}


def test_a_run_without_an_eight_bit_layer_is_detected(on_any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedLayers, "needs", lambda self, run: ())
    with pytest.raises(Refusal, match="no layer computed in 8 bits"):
        # on a CPU, the layers run in torch's operators
        trained([FusedLayers(precision="fp8"), Unpadding()], batches=plain_batches(2))


def test_scales_of_another_model_are_refused(on_any_device: None) -> None:
    model = in_float8(tiny_bert())
    held = float8_scales(model)
    with pytest.raises(ValueError, match=r"have different 8-bit layers: bert\.encoder\.layer\.1"):
        load_float8_scales(model, {"bert.encoder.layer.0": held["bert.encoder.layer.0"]})


KINDS = [
    ("modernbert", "ModernBertEncoderLayer"),
    ("deberta_v2", "DebertaV2Layer"),
    ("albert", "AlbertLayer"),
    ("esm", "EsmLayer"),
    ("jina_embeddings_v3", "JinaEmbeddingsV3Layer"),
]


@pytest.mark.parametrize(("family", "layer"), KINDS)
def test_other_layer_classes_are_refused_by_name(family: Any, layer: str) -> None:
    model = tiny_model(family)
    unpad(model)
    with pytest.raises(ValueError, match=rf"supports BERT's layers and similar ones, not {layer}$"):
        fuse(model, precision="fp8")
