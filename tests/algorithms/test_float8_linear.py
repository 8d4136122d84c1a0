"""Float8 Linears: parity with torchao at any number of rows, evidence of float8 matmuls, and a GPU's kernels."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear as TorchaoLinear

from composer_speedups import Float8Linear, MixedPrecision, TorchCompile, apply
from composer_speedups.algorithms.float8_linear.modules import RowPaddedFloat8Linear, convertible, to_float8, to_plain
from composer_speedups.core.errors import Refusal
from tests.helpers.common import (
    Recorder,
    assert_not_engaged,
    awkward_batches,
    batch,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.models import tiny_model
from tests.reference.tolerance import assert_near

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def bf16() -> MixedPrecision:
    return MixedPrecision("bf16", allow_cpu=True)


def config_of(recipe: Any, emulate: bool = True) -> Any:
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)


def linear(recipe: Any, *, emulate: bool = True, device: str = "cpu") -> tuple[nn.Linear, nn.Linear]:
    """Return a plain Linear and its float8 copy."""
    torch.manual_seed(0)
    plain = nn.Linear(32, 64).to(device)
    float8 = copy.deepcopy(plain)
    to_float8(float8, config_of(recipe, emulate))
    return plain, float8


def tiny_float8(recipe: Any = "tensorwise") -> Any:
    model = tiny_bert()
    for module in convertible(model):
        to_float8(module, config_of(recipe))
    return model


def run(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of input, weight and bias."""
    output = module(x)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    return [output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], upstream)]


def sample(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@every_recipe
@pytest.mark.parametrize("shape", [(16, 32), (2, 16, 32), (1, 32), (7, 1, 32), (2, 15, 32), (17, 32), (5, 13, 32)])
@pytest.mark.pins
def test_outputs_and_gradients_match_torchaos_emulation(
    recipe: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, float8 = linear(recipe)
    emulated = copy.deepcopy(float8)
    emulated.__class__ = TorchaoLinear  # emulation accepts any number of rows
    x, rows = sample(*shape), list[int]()
    expected, original = run(emulated, x), TorchaoLinear.forward

    def counted(self: Any, x: Any) -> Any:
        rows.append(x.shape[:-1].numel())
        return original(self, x)

    monkeypatch.setattr(TorchaoLinear, "forward", counted)
    padded, given = run(float8, x), x.shape[:-1].numel()
    assert rows == [-(-given // 16) * 16]
    if given % 16 == 0:
        torch.testing.assert_close(padded, expected, rtol=0, atol=0)
    assert_near(padded, expected, what="with and without padding rows")
    assert all(error(a, b) < 0.07 for a, b in zip(padded, run(plain, x), strict=True)), "error of 3 bits of mantissa"
    assert error(padded[0], run(plain, x)[0]) > 0.01, "really rounded to 8 bits"


def test_an_empty_batch_has_gradients_of_zero() -> None:
    _, float8 = linear("tensorwise")
    assert [g.abs().sum().item() for g in run(float8, sample(0, 32))] == [0, 0, 0, 0]


def test_only_the_class_of_a_module_changes_and_is_given_back() -> None:
    model = tiny_float8().eval()
    float8 = [m for m in model.modules() if isinstance(m, RowPaddedFloat8Linear)]
    assert len(float8) == 12
    assert not any(m.training for m in model.modules())
    assert type(model.classifier) is type(model.bert.pooler.dense) is nn.Linear, "outside the blocks"
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert isinstance(again.bert.encoder.layer[0].output.dense, RowPaddedFloat8Linear)
    for module in float8:
        to_plain(module)
    stock = [m for m in tiny_bert().modules() if isinstance(m, nn.Linear)]
    assert [vars(m).keys() for m in model.modules() if isinstance(m, nn.Linear)] == [vars(m).keys() for m in stock]


def test_odd_linears_are_left_out() -> None:
    odd = nn.Sequential(nn.ModuleList([nn.Linear(24, 32), nn.Linear(32, 24), nn.Linear(32, 48)]), nn.Linear(32, 32))
    assert convertible(odd) == [odd[0][2]]  # type: ignore[index]
    with pytest.raises(Refusal, match=r"multiples of 16; remove it"):
        apply(odd[0][:1], [Float8Linear(emulate=True)])  # type: ignore[index]


def test_it_counts_the_matmuls_of_the_first_batch() -> None:
    technique = Float8Linear(emulate=True)
    trained([bf16(), technique], batches=awkward_batches())
    assert technique.evidence == {
        "modules": 12,
        "recipe": "tensorwise",
        "emulated": True,
        "float8_matmuls": 36,  # three for each Linear, of which two are in the backward pass
        "seen_in": "forward and backward pass",
    }


def test_linears_without_float8_are_detected() -> None:
    trainer = make_trainer([bf16(), Float8Linear(emulate=True)])
    for module in trainer.state.model.modules():
        if isinstance(module, RowPaddedFloat8Linear):
            module.forward = lambda x, m=module: nn.functional.linear(x, m.weight, m.bias)  # type: ignore
    assert_not_engaged(trainer, "the batch had no matmul of float8 tensors")


@pytest.mark.parametrize(
    ("recipe", "backend", "gpu"),
    [
        pytest.param("tensorwise", "aot_eager", False, marks=pytest.mark.exhaustive),
        *(pytest.param(recipe, "inductor", True, marks=pytest.mark.gpu) for recipe in RECIPES),
    ],
)
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_compiled_code_matches_eager(recipe: Any, backend: str, gpu: bool, scope: Any) -> None:
    losses = []
    for others in ([], [TorchCompile(scope, backend)]):
        recorder, technique = Recorder(), Float8Linear(recipe, emulate=not gpu)
        model, batches = tiny_model("bert", layers=1), [plain_batches(1)[0], batch([14, 0, 5])]  # 42 rows need padding
        trained([bf16(), technique, *others], model=model, batches=batches, callbacks=[recorder], gpu=gpu)
        losses.append(recorder.losses)
        assert technique.engaged
    assert_near(losses[1], losses[0], torch.bfloat16, "losses")


@pytest.mark.gpu
@every_recipe
@pytest.mark.parametrize("shape", [(16, 32), (1, 32), (7, 1, 32), (2, 15, 32), (17, 32), (5, 13, 32)])
def test_kernels_match_emulation(recipe: str, shape: tuple[int, ...]) -> None:
    plain, float8 = linear(recipe, emulate=False, device="cuda")
    _, emulated = linear(recipe, device="cuda")
    x = sample(*shape, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        actual, expected, reference = run(float8, x), run(emulated, x), run(plain, x)
    for a, b, c in zip(actual, expected, reference, strict=True):
        assert error(a, b) < 0.02, "the rounding is the same, the precision of the sums is not"
        assert error(a, c) < 0.09
