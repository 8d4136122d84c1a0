"""Functions called twice: equal settings change nothing; different settings are refused or replace the first ones."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups import (
    TorchCompile,
    apply_gradient_checkpointing,
    apply_lora,
    apply_mixed_precision,
    apply_sdpa_attention,
    apply_torch_compile,
    apply_unpadding,
)
from composer_speedups.algorithms.optimizers import TECHNIQUES as OPTIMIZERS
from composer_speedups.core.catalogue import technique_names
from composer_speedups.core.errors import TechniqueError
from tests.helpers.common import batch, make_trainer, tiny_bert, without_labels
from tests.helpers.models import fit_batches, tiny_model

# Technique → the settings of the first call, and the settings that a second call is refused with, one at a time.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fast_layernorm": ({}, {"implementation": "apex"}),
    "float8_linear": ({"emulate": True}, {"recipe": "rowwise", "min_features": 64, "emulate": False}),
    "fused_layers": ({}, {"last_layer": "all", "precision": "fp8"}),
    "gradient_checkpointing": ({}, {"every": 2}),
    "layer_freezing": ({"layers": 1}, {"layers": "embeddings"}),
    "lora": (
        {"rank": 4},
        {"rank": 2, "alpha": 8.0, "targets": ["query"], "dropout": 0.1, "modules_to_save": ["pooler"]},
    ),
    "sparse_upcycling": ({"every": 1}, {"experts": 2, "every": 2, "top_k": 3}),
    "torch_compile": (
        {"backend": "eager"},
        {"scope": "blocks", "backend": "aot_eager", "mode": "default", "dynamic": True},
    ),
}
# A later call replaces the settings; see the tests below and each technique's own tests.
REPLACED = {"cuda_graphs", "mixed_precision", "sdpa_attention", "tf32_matmul", "unpadding"}
NEEDS = {"fused_layers": apply_unpadding}


def test_every_function_with_settings_is_in_one_of_the_lists() -> None:
    with_settings = {name for name in technique_names() if name not in OPTIMIZERS and _settings(name)}
    assert with_settings == set(REFUSED) | REPLACED
    for name, (_, others) in REFUSED.items():
        assert set(others) == _settings(name)


def _settings(name: str) -> set[str]:
    return set(inspect.signature(_function(name)).parameters) - {"model", "optimizer", "optimizers", "device"}


def _function(name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"composer_speedups.algorithms.{name}.functional")
    function: Callable[..., Any] = getattr(module, f"apply_{name}")
    return function


class Applied:
    """A technique's function after its first call; ``again`` calls it with the same settings, updated by ``others``."""

    def __init__(self, name: str) -> None:
        self.function, (self.settings, _) = _function(name), REFUSED[name]
        self.model: nn.Module = tiny_bert()
        if name in NEEDS:
            NEEDS[name](self.model)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.result = self.again()
        if isinstance(self.result, torch.optim.Optimizer):
            self.optimizer = self.result

    def again(self, **others: Any) -> Any:
        parameters = inspect.signature(self.function).parameters
        given = {"model": self.model, "optimizer": self.optimizer, **self.settings, **others}
        return self.function(**{name: value for name, value in given.items() if name in parameters})


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.pins
def test_the_same_settings_change_nothing(name: str) -> None:
    applied = Applied(name)
    types, weights = [type(m) for m in applied.model.modules()], copy.deepcopy(applied.model.state_dict())
    assert applied.result
    assert applied.again() == ([] if isinstance(applied.result, list) else applied.optimizer)
    assert [type(m) for m in applied.model.modules()] == types
    torch.testing.assert_close(applied.model.state_dict(), weights, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "setting"), [(n, s) for n, (_, others) in REFUSED.items() for s in others])
@pytest.mark.pins
def test_different_settings_are_refused_by_name(name: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_speedups.algorithms.fast_layernorm.functional.requirements_of", lambda *_: ())
    monkeypatch.setattr("composer_speedups.algorithms.float8_linear.functional.unsuitable_device", lambda *_: None)
    applied, value = Applied(name), REFUSED[name][1][setting]
    types = [type(m) for m in applied.model.modules()]
    with pytest.raises(ValueError, match=f"{setting}=") as error:
        applied.again(**{setting: value})
    assert "already" in str(error.value)
    assert "\n" not in str(error.value)
    assert [type(m) for m in applied.model.modules()] == types


def test_explicit_defaults_equal_omitted_settings() -> None:
    model = tiny_bert()
    apply_lora(model)
    assert apply_lora(model, targets="all-linear", modules_to_save=["classifier"]) == []
    named = tiny_bert()
    assert len(apply_lora(named, targets=["query", "value"])) == 4
    assert apply_lora(named, targets=["value", "query"]) == []
    with pytest.raises(ValueError, match=r"with targets=\['query', 'value'\]; to use targets='all-linear', build"):
        apply_lora(named)
    blocks = tiny_bert()  # of two blocks, every second and every third are the same
    apply_gradient_checkpointing(blocks, 2)
    assert apply_gradient_checkpointing(blocks, 3) == []


def test_copies_of_a_compiled_model_accept_any_settings() -> None:
    model = tiny_bert()
    apply_torch_compile(model, backend="eager")
    assert apply_torch_compile(copy.deepcopy(model), backend="aot_eager") == [""]


def test_a_model_compiled_by_other_code_is_refused() -> None:
    model = tiny_bert()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="the model is already compiled by other code"):
        apply_torch_compile(model, backend="eager")


def test_a_trainer_refuses_different_settings_with_the_techniques_name() -> None:
    model = tiny_bert()
    apply_torch_compile(model, backend="eager")
    with pytest.raises(TechniqueError, match="torch_compile: the model already has compiled modules with backend='ea"):
        make_trainer([TorchCompile(backend="aot_eager")], model=model)


# Functions whose second call replaces the settings of the first.


def test_a_second_attention_backend_or_dtype_replaces_the_first() -> None:
    model = tiny_bert()
    apply_sdpa_attention(model, "math")
    assert apply_sdpa_attention(model, "auto") == {"": "sdpa_only_math"}
    assert model.config._attn_implementation == "sdpa"
    apply_mixed_precision(model, "bf16")
    first: Any = model.forward
    apply_mixed_precision(model, "bf16")
    assert model.forward is first


@pytest.mark.parametrize("heads", [("labelled", "all"), ("all", "labelled")])
def test_unpaddings_last_head_holds(heads: tuple[Any, Any]) -> None:
    model = tiny_model("bert", "mlm").train()
    for head in heads:
        apply_unpadding(model, 8, head)
    (inputs,) = fit_batches(model, [batch([12, 7, 16])])
    assert (model(**inputs).logits.shape[0] == 1) == (heads[-1] == "labelled")


@pytest.mark.parametrize("checks", [("auto", "never"), ("never", "auto"), ("auto", "auto"), ("never", "always")])
def test_unpaddings_last_check_holds(checks: tuple[Any, Any]) -> None:
    """Without a head, ``"never"`` packs the first batch; otherwise gradients must show first that padding is not read.
    Other than ``"never"``, each compares a model that has a hook."""
    model = tiny_bert().bert
    model.embeddings.register_forward_hook(lambda *_: None)
    for check in checks:
        apply_unpadding(model, 8, check=check)
    calls: list[int] = []
    model.embeddings.register_forward_hook(lambda *_: calls.append(1))
    inputs = without_labels(batch([5, 12, 9]))
    mask = inputs["attention_mask"][..., None]
    for ran in ("padded", "unpadded") if checks[-1] != "never" else ("unpadded", "unpadded"):
        output = model(**inputs).last_hidden_state
        assert model.encoder.ran == ran
        (output * mask).sum().backward()
    assert len(calls) == (2 if checks[-1] == "never" else 4)


def test_unpaddings_observations_and_comparisons_are_kept_with_the_same_settings() -> None:
    model = tiny_bert().bert
    apply_unpadding(model, 8)
    inputs = without_labels(batch([5, 12, 9]))
    (model(**inputs).last_hidden_state * inputs["attention_mask"][..., None]).sum().backward()
    calls: list[int] = []
    model.embeddings.register_forward_hook(lambda *_: calls.append(1))
    assert apply_unpadding(model, 16) == []
    assert model(**inputs).last_hidden_state.shape[1] == 12
    assert (model.encoder.ran, len(calls)) == ("unpadded", 1)
