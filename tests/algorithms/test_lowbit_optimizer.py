"""torchao's low-bit AdamW: why embeddings keep float32 state, its precision, parity with AdamW, the compiled step."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from composer_speedups import LowBitOptimizer, TorchCompile, apply_lowbit_optimizer
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.operator_recorder import compile_counts, counted_apart
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import screen
from tests.helpers.common import grouped_adamw, step_alike, tiny_bert, trained

every_width = pytest.mark.parametrize("bits", [8, 4, "fp8"])


# Why embeddings jump with low-bit state.


def moved_after_a_step_without_gradient(bits: Any, small: float) -> float:
    """Return the second step's change of a value whose gradients are ``small``, then 0, in a block with a 1."""
    weight = nn.Parameter(torch.zeros(16, 256))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, foreach=False)
    if bits != 32:
        optimizer = apply_lowbit_optimizer(nn.Module(), optimizer, bits, min_size=0)
    for gradient in (small, 0.0):
        before = weight.detach()[0, 1].clone()
        weight.grad = torch.full_like(weight, gradient)
        weight.grad[:, 0] = 1.0
        optimizer.step()
    return float((weight.detach()[0, 1] - before).abs())


@pytest.mark.parametrize(("bits", "flushed", "kept"), [(8, 3e-4, 1e-2), ("fp8", 1e-3, 1e-2)])
def test_the_second_moment_underflows_before_the_first(bits: Any, flushed: float, kept: float) -> None:
    """(g/max)² rounds to zero in the second moment, g/max does not in the first: the next update is moment / eps."""
    assert moved_after_a_step_without_gradient(32, flushed) < 1e-3
    assert moved_after_a_step_without_gradient(bits, flushed) > 1000 * 1e-3
    assert moved_after_a_step_without_gradient(bits, kept) < 1e-3


def test_four_bits_have_no_code_for_zero_in_the_second_moment() -> None:
    for small in (1e-1, 1e-2, 1e-3, 3e-4, 1e-5):
        assert moved_after_a_step_without_gradient(4, small) < 1e-3


@cache
def embedding_moved(bits: Any, embeddings_32bit: bool = True) -> float:
    """Return the largest change of a word embedding in 16 steps at 1e-3, with words drawn by Zipf's law."""
    torch.set_num_threads(1)  # faster than two with such small tensors
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    words = model.bert.embeddings.word_embeddings.weight
    start = words.detach().clone()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    if bits != 32:
        optimizer = apply_lowbit_optimizer(model, optimizer, bits, embeddings_32bit)
    generator, frequencies = torch.Generator().manual_seed(1), 1 / torch.arange(10, 522)
    for _ in range(16):
        ids = torch.multinomial(frequencies, 16 * 32, True, generator=generator).view(16, 32)
        model(ids, labels=(ids[:, 0] > 60).long()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float((words.detach() - start).abs().max())


@pytest.mark.parametrize(("bits", "jump"), [(8, 0.9), ("fp8", 3.7)])
def test_embeddings_jump_only_with_low_bit_state(bits: Any, jump: float) -> None:
    """The card states these figures."""
    assert embedding_moved(32) == pytest.approx(0.013, rel=0.2)
    assert embedding_moved(bits, embeddings_32bit=False) == pytest.approx(jump, rel=0.25)
    assert embedding_moved(bits) == pytest.approx(embedding_moved(32), rel=0.2)


def test_four_bit_embeddings_do_not_jump() -> None:
    assert embedding_moved(4, embeddings_32bit=False) < 2 * embedding_moved(32)


# Otherwise it behaves like AdamW.


@every_width
def test_with_float32_state_it_equals_adamw(bits: Any) -> None:
    models = [tiny_bert(), tiny_bert()]
    optimizers: list[Any] = [grouped_adamw(model) for model in models]
    optimizers[1] = apply_lowbit_optimizer(models[1], optimizers[1], bits)  # no parameter has 4096 values
    step_alike(models, optimizers)
    torch.testing.assert_close(dict(models[1].named_parameters()), dict(models[0].named_parameters()))


def test_a_closure_runs_once_with_gradients() -> None:
    model = tiny_bert()
    optimizer = apply_lowbit_optimizer(model, grouped_adamw(model), min_size=1024)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        losses.append(sum(p.square().sum() for p in model.parameters()))
        losses[-1].backward()
        return losses[-1]

    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert all(len(optimizer.state[p]) for p in model.parameters())


@pytest.mark.parametrize(
    ("inductors", "installed", "fits"),
    [
        ((None, "g++"), "g++", True),
        ((None, "clang++"), "clang++", True),  # on macOS
        ("/opt/bin/c++", "/opt/bin/c++", True),
        ((None, "g++"), "clang++", False),  # inductor tries only g++ on Linux
    ],
)
def test_the_compiled_step_needs_the_compiler_that_inductor_uses(
    monkeypatch: pytest.MonkeyPatch, inductors: Any, installed: str, fits: bool
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if name == installed else None)
    refusal = pytest.raises(
        TechniqueError, match=r"its compiled step needs the C\+\+ compiler g\+\+; install it, set CXX"
    )
    with torch._inductor.config.patch({"cpp.cxx": inductors}), nullcontext() if fits else refusal:
        screen([LowBitOptimizer(8, compiled=True)], Context(torch.device("cpu")))
    screen([LowBitOptimizer(8)], Context(torch.device("cpu")))  # not compiled on a CPU


def test_compiled_fp8_needs_ada_or_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(TechniqueError, match=r"fp8 state needs .* 8\.9 or newer, and an A100 is 8\.0"):
        screen([LowBitOptimizer("fp8")], context)
    for other in (LowBitOptimizer("fp8", compiled=False), LowBitOptimizer(8), LowBitOptimizer(4)):
        screen([other, TorchCompile()], context)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    screen([LowBitOptimizer("fp8")], context)


def test_graphs_compiled_apart_are_not_counted() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    before = compile_counts()
    with counted_apart():
        torch.compile(double, backend="aot_eager")(torch.ones(3))
    assert compile_counts().since(before)[:4] == (0, 0, 0, 0)
    torch.compile(lambda x: x * 3, backend="aot_eager")(torch.ones(3))
    assert compile_counts().since(before).graphs == 1


def _train_compiled(bits: Any, *, backend: str, scope: Any = "model", gpu: bool = False) -> dict[str, Any]:
    torch._dynamo.reset()
    compiler = TorchCompile(scope, backend)
    lowbit = [LowBitOptimizer(bits, min_size=1024)] if bits else []
    trained([compiler, *lowbit], gpu=gpu)
    assert all(t.engaged for t in [compiler, *lowbit])
    return compiler.evidence


def test_the_model_is_still_compiled_on_the_cpu() -> None:
    both, alone = (_train_compiled(bits, scope="blocks", backend="eager") for bits in (8, None))
    assert both["graphs"] == alone["graphs"]


@pytest.mark.gpu
@every_width
def test_the_compiled_step_is_not_counted_as_the_models_on_a_gpu(bits: Any) -> None:
    alone = _train_compiled(None, backend="inductor", gpu=True)
    both = _train_compiled(bits, backend="inductor", gpu=True)
    assert [both[k] for k in ("graphs", "recompiles")] == [alone[k] for k in ("graphs", "recompiles")]


@pytest.mark.gpu
@every_width
def test_the_compiled_step_matches_the_eager_step(bits: Any) -> None:
    weights = []
    for compiled in (True, False):
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 256, generator=generator).cuda())
        optimizer = torch.optim.AdamW([weight], lr=1e-3, foreach=False)
        optimizer = apply_lowbit_optimizer(nn.Module(), optimizer, bits, compiled=compiled)
        before = compile_counts()
        for _ in range(3):
            weight.grad = torch.randn(64, 256, generator=generator).cuda()
            optimizer.step()
        assert compile_counts().since(before)[:4] == (0, 0, 0, 0)
        weights.append(weight.detach())
    # A value between two codes may round to either; every update is smaller than twice the learning rate.
    close = (weights[0] - weights[1]).abs() < 1e-5
    assert close.float().mean() > 0.99
    assert (weights[0] - weights[1]).abs().max() < 3 * 2e-3
