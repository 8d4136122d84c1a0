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

from composer_speedups import Float8Linear, MixedPrecision, TorchCompile, apply_float8_linear
from composer_speedups.algorithms.float8_linear.modules import Float8Recorder, RowPaddedFloat8Linear, to_float8
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import screen
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
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def bf16() -> MixedPrecision:
    return MixedPrecision("bf16", allow_cpu=True)


def linear(recipe: Any, *, emulate: bool = True, device: str = "cpu") -> tuple[nn.Linear, nn.Linear]:
    """Return a plain Linear and its float8 copy."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.ModuleList([nn.Linear(32, 64)])).to(device)
    plain: Any = copy.deepcopy(block[0][0])
    assert apply_float8_linear(block, recipe, emulate=emulate) == ["0.0"]
    return plain, block[0][0]


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
@pytest.mark.parametrize("shape", [(16, 32), (2, 16, 32), (3, 32, 32)])
def test_multiples_of_16_rows_equal_torchaos_linear(recipe: str, shape: tuple[int, ...]) -> None:
    plain, float8 = linear(recipe)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    torchaos = TorchaoLinear.from_float(plain, config)
    torch.testing.assert_close(run(float8, sample(*shape)), run(torchaos, sample(*shape)), rtol=0, atol=0)


@every_recipe
@pytest.mark.parametrize("shape", [(1, 32), (7, 1, 32), (2, 15, 32), (17, 32), (5, 13, 32)])
@pytest.mark.pins
def test_other_numbers_of_rows_match_torchaos_emulation(recipe: str, shape: tuple[int, ...]) -> None:
    plain, float8 = linear(recipe)
    emulated = copy.deepcopy(float8)
    emulated.__class__ = TorchaoLinear  # emulation accepts any number of rows
    x = sample(*shape)
    with Float8Recorder() as recorder:
        padded = run(float8, x)
    assert recorder.counts["float8_mm"] == (2 if recipe == "rowwise_with_gw_hp" else 3)
    assert_near(padded, run(emulated, x), what="with and without padding rows")
    assert all(error(a, b) < 0.07 for a, b in zip(padded, run(plain, x), strict=True)), "error of 3 bits of mantissa"
    assert error(padded[0], run(plain, x)[0]) > 0.01, "really rounded to 8 bits"


@every_recipe
def test_rows_are_padded_to_multiples_of_16(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = TorchaoLinear.forward

    def record_rows(module: Any, x: Tensor) -> Any:
        seen.append(x.shape[:-1].numel())
        return original(module, x)

    monkeypatch.setattr(TorchaoLinear, "forward", record_rows)
    _, float8 = linear(recipe)
    for shape in [(1, 32), (3, 5, 32), (32, 32), (2, 9, 32)]:
        assert float8(sample(*shape)).shape == (*shape[:-1], 64)
    assert seen == [16, 16, 32, 32]


def test_the_recorder_counts_kernels_inside_torchaos_tensors() -> None:
    module = nn.Linear(32, 64)
    to_float8(module, Float8LinearConfig.from_recipe_name("tensorwise"))
    with Float8Recorder() as recorder, torch.no_grad():
        module(torch.ones(5, 32))  # the forward kernel also runs on a CPU; the backward kernel may not
    assert recorder.counts["_scaled_mm"] == recorder.counts["float8_mm"] == 1


def test_an_empty_batch_has_gradients_of_zero() -> None:
    _, float8 = linear("tensorwise")
    assert [g.abs().sum().item() for g in run(float8, sample(0, 32))] == [0, 0, 0, 0]


def test_only_the_forward_of_a_module_changes() -> None:
    model = tiny_bert().eval()
    query = model.bert.encoder.layer[0].attention.self.query
    query.weight.requires_grad_(False)
    calls: list[int] = []
    query.register_forward_hook(lambda *_: calls.append(1))
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    changed = apply_float8_linear(model, emulate=True)
    assert len(changed) == 12
    assert all(isinstance(modules[n], RowPaddedFloat8Linear) for n in changed)
    assert all(modules[n] is m for n, m in model.named_modules())
    assert all(parameters[n] is p for n, p in model.named_parameters())
    assert not any(m.training for m in model.modules())
    assert not query.weight.requires_grad
    model(**plain_batches(1)[0])
    assert calls == [1]
    assert type(model.classifier) is type(model.bert.pooler.dense) is nn.Linear, "outside the blocks"
    assert apply_float8_linear(model, emulate=True) == []
    again = pickle.loads(pickle.dumps(copy.deepcopy(tiny_float8())))
    assert isinstance(again.bert.encoder.layer[0].output.dense, RowPaddedFloat8Linear)


def tiny_float8(recipe: Any = "tensorwise") -> Any:
    model = tiny_bert()
    apply_float8_linear(model, recipe, emulate=True)
    return model


def test_small_and_odd_linears_are_left_out() -> None:
    assert all("attention" not in n for n in apply_float8_linear(tiny_bert(), min_features=33, emulate=True))
    assert len(apply_float8_linear(tiny_bert(), min_features=64, emulate=True)) == 0
    odd = nn.ModuleList([nn.Linear(24, 32), nn.Linear(32, 24), nn.Linear(32, 48)])
    assert apply_float8_linear(odd, emulate=True) == ["2"]


@every_recipe
def test_gradients_of_a_model_have_a_high_cosine_similarity(recipe: Any) -> None:
    plain = train_plainly(tiny_bert(), awkward_batches())
    float8 = train_plainly(tiny_float8(recipe), awkward_batches())
    one, other = (torch.cat([g.flatten() for g in t.first_gradients.values()]) for t in (float8, plain))
    assert float(torch.cosine_similarity(one, other, dim=0)) > 0.93


# In a Trainer.


@pytest.mark.parametrize("batches", [awkward_batches(), plain_batches(2)], ids=["awkward", "plain"])
def test_it_counts_the_matmuls_of_the_first_forward_pass(batches: Any) -> None:
    technique = Float8Linear(emulate=True)
    trained([bf16(), technique], batches=batches)
    assert technique.evidence == {
        "modules": 12,
        "recipe": "tensorwise",
        "emulated": True,
        "float8_matmuls": 12,
        "float8_kernels": 0,
        "seen_in": "forward pass",
    }


def test_linears_without_float8_are_detected() -> None:
    trainer = make_trainer([bf16(), Float8Linear(emulate=True)])
    for module in trainer.state.model.modules():
        if isinstance(module, RowPaddedFloat8Linear):
            module.forward = lambda x, m=module: nn.functional.linear(x, m.weight, m.bias)  # type: ignore
    assert_not_engaged(trainer, "forward pass had no matmul of float8 tensors")


def test_emulation_instead_of_kernels_is_detected() -> None:
    technique = Float8Linear(emulate=True)
    trainer = make_trainer([bf16(), technique])
    technique.emulate = False  # the technique now expects kernels, and torchao emulates
    assert_not_engaged(trainer, "ran no float8 kernel")


def test_a_kernel_that_cannot_run_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([bf16(), Float8Linear(emulate=True)])

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("no such kernel\nhere")

    monkeypatch.setattr(RowPaddedFloat8Linear, "forward", fail)
    with pytest.raises(TechniqueError, match=r"cannot run here \(no such kernel\); try another recipe") as raised:
        trainer.fit()
    assert "\n" not in str(raised.value)
    trainer.close()


def test_unmet_requirements_are_refused() -> None:
    cpu = Context(torch.device("cpu"))
    with pytest.raises(TechniqueError, match=r"float8_linear: tensorwise float8 needs a CUDA GPU .* 8\.9"):
        screen([bf16(), Float8Linear()], cpu)
    with pytest.raises(TechniqueError, match=r"rowwise float8 needs a CUDA GPU .* 9\.0"):
        screen([bf16(), Float8Linear("rowwise")], cpu)
    with pytest.raises(TechniqueError, match=r"needs mixed precision, and this run is fp32; add mixed_precision"):
        screen([Float8Linear(emulate=True)], cpu)
    with pytest.raises(ValueError, match=r"needs a CUDA GPU of compute capability 8\.9 .* on the cpu; set emulate"):
        apply_float8_linear(tiny_bert())
    with pytest.raises(TechniqueError, match=r"at least min_features=1000; remove it"):
        make_trainer([bf16(), Float8Linear(min_features=1000, emulate=True)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_compiled_code_matches_eager_and_is_probed(scope: Any) -> None:
    check_compiled("tensorwise", scope, "aot_eager", gpu=False)


def check_compiled(recipe: Any, scope: Any, backend: str, *, gpu: bool) -> None:
    losses = []
    for others in ([], [TorchCompile(scope, backend)]):
        recorder, technique = Recorder(), Float8Linear(recipe, emulate=not gpu)
        model, batches = tiny_model("bert", layers=1), [plain_batches(1)[0], batch([14, 0, 5])]  # 42 rows need padding
        trained([bf16(), technique, *others], model=model, batches=batches, callbacks=[recorder], gpu=gpu)
        losses.append(recorder.losses)
        assert technique.evidence["seen_in"] == ("probe" if others else "forward pass")
        assert technique.evidence["float8_matmuls"] > 0
        assert bool(technique.evidence["float8_kernels"]) == gpu
    assert_near(losses[1], losses[0], torch.bfloat16, "losses")


@pytest.mark.gpu
@every_recipe
@pytest.mark.parametrize("shape", [(16, 32), (1, 32), (7, 1, 32), (2, 15, 32), (17, 32), (5, 13, 32)])
def test_kernels_match_emulation(recipe: str, shape: tuple[int, ...]) -> None:
    plain, float8 = linear(recipe, emulate=False, device="cuda")
    _, emulated = linear(recipe, device="cuda")
    x = sample(*shape, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        with Float8Recorder() as recorder:
            actual = run(float8, x)
        expected, reference = run(emulated, x), run(plain, x)
    forward_and_backward = 2 if recipe == "rowwise_with_gw_hp" else 3
    assert recorder.counts["_scaled_mm"] == recorder.counts["float8_mm"] == forward_and_backward
    for a, b, c in zip(actual, expected, reference, strict=True):
        assert error(a, b) < 0.02, "the rounding is the same, the precision of the sums is not"
        assert error(a, c) < 0.09


@pytest.mark.gpu
@every_recipe
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_inductor_matches_eager_on_a_gpu(recipe: Any, scope: Any) -> None:
    check_compiled(recipe, scope, "inductor", gpu=True)


@pytest.mark.gpu
@every_recipe
def test_compiled_code_launches_float8_kernels(recipe: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    _, float8 = linear(recipe, emulate=False, device="cuda")
    compiled: Any = torch.compile(float8)
    x = sample(2, 15, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        run_compiled = lambda: compiled(x).sum().backward()  # noqa: E731
        run_compiled()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            run_compiled()
    calls = {event.key: event.count for event in profiler.key_averages()}
    assert calls.get("aten::_scaled_mm", 0) >= 1, sorted(calls)
