"""fast_layernorm's refusals: modules without a suitable kernel, machines without a GPU or Apex, and wrong settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups import FastLayerNorm, apply_fast_layernorm
from composer_speedups.algorithms.fast_layernorm import functional
from composer_speedups.core.errors import TechniqueError
from composer_speedups.surgery.already_applied import NoEffectWarning
from tests.helpers.common import make_trainer, tiny_bert, trained
from tests.reference import apex


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the requirement of a GPU, and install the stand-in for Apex."""
    apex.install(monkeypatch)
    monkeypatch.setattr(functional, "requirements_of", lambda *_: ())


@pytest.mark.usefixtures("without_gpu")
def test_unsuitable_layernorms_are_kept_and_named() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict(
            {
                "whole": nn.LayerNorm(4),
                "no_bias": nn.LayerNorm(4, bias=False),
                "no_weight": nn.LayerNorm(4, elementwise_affine=False),
                "two_dimensions": nn.LayerNorm((2, 4)),
            }
        )

    for implementation, expected in {"triton": ["whole"], "apex": ["whole", "two_dimensions"]}.items():
        changed: Any = model()
        with pytest.warns(NoEffectWarning, match=rf"not changed, because {implementation} needs.*: no_bias, no_weight"):
            assert apply_fast_layernorm(changed, implementation=implementation) == expected  # type: ignore
        assert type(changed["no_bias"]) is nn.LayerNorm
    assert len(apply_fast_layernorm(model())) == 4
    lowered = model()
    apply_fast_layernorm(lowered)
    with pytest.raises(ValueError, match="already has fast LayerNorms with implementation='low_precision'; to use"):
        apply_fast_layernorm(lowered, implementation="triton")


@pytest.mark.usefixtures("without_gpu")
def test_unsuitable_layernorms_are_named_and_refused_if_there_are_no_others() -> None:
    model: Any = tiny_bert()
    model.bert.embeddings.LayerNorm = nn.LayerNorm(32, bias=False)
    technique = FastLayerNorm("apex")
    trained([technique], model=model)
    assert technique.evidence["left_alone"] == ["model.bert.embeddings.LayerNorm"]
    assert technique.evidence["modules"] == 4
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__, module.bias = nn.LayerNorm, None
    with pytest.raises(TechniqueError, match=r"LayerNorm that is supported: apex needs a weight and a bias; remove it"):
        make_trainer([FastLayerNorm("apex")], model=model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests errors of machines without a GPU")
@pytest.mark.parametrize("implementation", ["triton", "apex"])
def test_without_a_gpu_it_is_refused(implementation: Any) -> None:
    with pytest.raises(TechniqueError, match=r"fast_layernorm: .*needs a CUDA GPU.*on_unavailable"):
        make_trainer([FastLayerNorm(implementation)])
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        apply_fast_layernorm(tiny_bert(), implementation=implementation)


def test_without_apex_the_error_names_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    met = (True, "", "")
    monkeypatch.setattr(functional, "needs_cuda", lambda *_: met)
    with pytest.raises(ValueError, match=r"Apex is not installed with its CUDA extensions; build .* NVIDIA/apex"):
        apply_fast_layernorm(tiny_bert(), implementation="apex")
    apex.install(monkeypatch)
    assert len(apply_fast_layernorm(tiny_bert(), implementation="apex")) == 5


def test_other_words_are_refused() -> None:
    wrong: Any = "liger"
    with pytest.raises(ValueError, match="implementation must be 'low_precision', 'triton' or 'apex', not 'liger'"):
        FastLayerNorm(wrong)
    with pytest.raises(ValueError, match="implementation must be one of low_precision, triton, apex, not 'liger'"):
        apply_fast_layernorm(tiny_bert(), implementation=wrong)
