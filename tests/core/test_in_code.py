"""Techniques in users' own code: Trainers with stock Composer models, and functions on plain modules.

Every technique of tests/helpers/settings.py either works or is refused in one line, by a TechniqueError with its name
(in a Trainer) or a ValueError (by a function). On a CPU, techniques that need a GPU are refused.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.devices import DeviceCPU
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, HuggingFaceModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification

from composer_speedups import TorchCompile
from composer_speedups.algorithms.optimizers import TECHNIQUES as OPTIMIZERS
from composer_speedups.core.catalogue import technique_names
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.registry import technique_class
from composer_speedups.core.technique import Technique, refuse_conflicts
from composer_speedups.surgery.already_applied import NoEffectWarning
from tests.helpers.common import final_weights, plain_batches, tiny_config
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.settings import ENTRIES, Case

# Functions warn if they find nothing to change
pytestmark = pytest.mark.filterwarnings(f"ignore::{NoEffectWarning.__module__}.{NoEffectWarning.__qualname__}")


def vectors() -> DataLoader[Any]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    rows: Any = [(row, int(row.sum() > 0)) for row in x]
    return DataLoader(rows, batch_size=4)


def mlp() -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))
    return ComposerClassifier(layers, num_classes=2), vectors()


def convnet() -> tuple[Any, Any]:
    torch.manual_seed(0)
    convolution = [nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)]
    return ComposerClassifier(nn.Sequential(*convolution, nn.Flatten(), nn.Linear(32, 2)), num_classes=2), vectors()


def bert() -> tuple[Any, Any]:
    """Build BERT as users do: default attention implementation, no tokenizer, rows collated by the DataLoader."""
    torch.manual_seed(0)
    rows: Any = [{k: v[i] for k, v in batch.items()} for batch in plain_batches(3) for i in range(4)]
    model = AutoModelForSequenceClassification.from_config(tiny_config())
    return HuggingFaceModel(model, use_logits=True), DataLoader(rows, batch_size=4)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {"mlp": mlp, "convnet": convnet, "bert": bert}
CASES = others_exhaustive(
    (
        pytest.param(case, id=case.id)
        for name, entry in sorted(ENTRIES.items())
        for arguments in entry.variants or entry.gpu_variants  # variants for a GPU are refused
        for case in [Case(name, tuple(arguments.items()), entry)]
    ),
    lambda case: dict(case.arguments) == (case.entry.variants or case.entry.gpu_variants)[0],
)


def train(techniques: list[Technique], model: Any, loader: Any) -> Trainer:
    """Train with a plain Composer Trainer and stock AdamW; only the techniques are from this package."""
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_duration="2ba",
        algorithms=techniques,
        precision="fp32",
        device=DeviceCPU(),
        loggers=[InMemoryLogger()],
        progress_bar=False,
        seed=1,
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
    return trainer


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_a_stock_composer_model_trains_or_the_technique_is_refused(case: Case, model: str) -> None:
    techniques = case.build_all()
    refusal = trainer = None
    try:
        trainer = train(techniques, *MODELS[model]())
    except TechniqueError as error:
        refusal = error
    if refusal is not None:
        assert refusal.technique in {t.name for t in techniques}
        assert str(refusal).startswith(f"{refusal.technique}: ")
        assert "\n" not in str(refusal)
        assert refusal.fix
        return
    assert all(t.engaged for t in techniques)
    assert set(case.entry.evidence) <= set(techniques[-1].evidence)
    assert all(w.isfinite().all() for w in final_weights(trainer).values())


def test_supported_techniques_engage_on_stock_models() -> None:
    """Without this test, refusing everything would pass."""
    general = {"foreach_optimizer", "fused_optimizer", "mixed_precision", "torch_compile"}
    for model, names in {
        "mlp": general | {"fast_layernorm"},
        "bert": general | {"fast_layernorm", "sdpa_attention"},
    }.items():
        techniques = [_first(name) for name in sorted(names - {"foreach_optimizer", "torch_compile"})]
        # An MLP has no repeated blocks; the whole model is the default.
        techniques.append(_first("torch_compile") if model == "bert" else TorchCompile(backend="aot_eager"))
        assert ("blocks" in repr(techniques)) == (model == "bert")
        train(techniques, *MODELS[model]())
        assert all(t.engaged for t in techniques), model


def test_all_compatible_techniques_train_a_stock_bert_together() -> None:
    """Combine as many techniques as do not conflict, in reverse order."""
    together: list[Technique] = []
    for name, entry in sorted(ENTRIES.items()):
        if entry.variants and entry.stock_checkpoint and technique_class(name).exactness != "recipe":
            together = _with(together, _first(name))
    assert len(together) >= 5
    trainer = train(together[::-1], *bert())
    assert all(t.engaged for t in together)
    assert all(w.isfinite().all() for w in final_weights(trainer).values())


def _first(name: str) -> Technique:
    return technique_class(name)(**ENTRIES[name].variants[0])


def _with(techniques: list[Technique], another: Technique) -> list[Technique]:
    try:
        refuse_conflicts([*techniques, another])
    except TechniqueError:
        return techniques
    return [*techniques, another]


@pytest.mark.parametrize("kind", ["mlp", "convnet", "bert"])
@pytest.mark.parametrize("case", [c for c in CASES if c.values[0].name not in OPTIMIZERS])
def test_a_function_works_on_a_plain_module_or_is_refused(case: Case, kind: str) -> None:
    """Apply the function, then train for two steps without Composer."""
    torch.manual_seed(0)
    wrapped, loader = MODELS[kind]()
    model: Any = wrapped.model if kind == "bert" else wrapped.module
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    module = importlib.import_module(f"composer_speedups.algorithms.{case.name}.functional")
    function = getattr(module, f"apply_{case.name}")
    parameters = inspect.signature(function).parameters
    offered: dict[str, Any] = {"model": model, "optimizer": optimizer, "optimizers": optimizer, "device": DeviceCPU()}
    offered.update(case.arguments)
    before, refusal, result = torch.get_float32_matmul_precision(), None, None
    try:
        result = function(**{name: value for name, value in offered.items() if name in parameters})
    except ValueError as error:  # the base class of TechniqueError
        refusal = str(error)
    finally:
        torch.set_float32_matmul_precision(before)
    if refusal is not None:
        assert "\n" not in refusal
        assert len(refusal) > 20
        return
    model = result if isinstance(result, nn.Module) else model
    optimizer = result if isinstance(result, torch.optim.Optimizer) else optimizer
    model.train()
    for batch in itertools.islice(loader, 2):
        loss = _loss(model, batch)
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())


def _loss(model: Any, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return model(**batch).loss
    return F.cross_entropy(model(batch[0]).float(), batch[1])


@pytest.mark.parametrize("name", technique_names())
def test_class_and_function_are_public(name: str) -> None:
    import composer_speedups

    cls = technique_class(name)
    assert getattr(composer_speedups, cls.__name__) is cls
    assert cls.__name__ in composer_speedups.__all__
    assert (f"apply_{name}" in composer_speedups.__all__) == (name not in OPTIMIZERS)
    assert name in OPTIMIZERS or callable(getattr(composer_speedups, f"apply_{name}"))
