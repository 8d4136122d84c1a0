"""The flattened loop computes what the padded model computes, and its CUDA graphs replay that."""

from __future__ import annotations

import copy
import functools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.peers import flash_attention_4, flattened_loop
from composer_speedups.core.compile_counts import compile_counts
from composer_speedups.core.errors import ConfigError
from tests.helpers.common import Batch, batch
from tests.helpers.models import tiny_model
from tests.reference.tolerance import assert_near

MASK = 3  # of the tiny ESM
# Parameters that take no part in a classification, and therefore have no gradients.
WITHOUT_GRADIENT = {"esm": ["esm.contact_head.regression.weight", "esm.contact_head.regression.bias"]}
FAMILIES = ["bert", "esm", "modernbert"]


LARGE_HEADS = {"hidden_size": 128, "initializer_range": 0.1}  # of 64 units


def untouched(family: str, **settings: Any) -> Any:
    own: dict[str, dict[str, Any]] = {"esm": {"token_dropout": True}, "modernbert": {"classifier_pooling": "mean"}}
    return tiny_model(family, **own.get(family, {}), **settings)  # type: ignore[arg-type]


def flattened(reference: Any, *, fa4: bool = False) -> Any:
    """A copy of a model as the loop prepares it, without dropout."""
    attend = functools.partial(flattened_loop.varlen_attention, fa4=fa4)
    flattened_loop.register_attention(attend)
    model = copy.deepcopy(reference)
    flattened_loop.check_model(model)
    model.set_attn_implementation(flattened_loop.ATTENTION)
    flattened_loop.prepare(model, attend)
    return model


def inputs_of(lengths: list[int], family: str) -> Batch:
    """A batch; of ESM with masked tokens, a different share in each row."""
    inputs = batch(lengths, 16)
    if family == "esm":
        inputs["input_ids"][inputs["input_ids"] == MASK] = MASK + 1
        for row, length in enumerate(lengths):
            inputs["input_ids"][row, 1 : 1 + length // 4] = MASK
    return inputs


def gradients_for(name: str, wanted: dict[str, Any]) -> Any:
    """The untouched gradients of a parameter, of which the loop may have joined three."""
    parts = [wanted[name.replace("qkv", part)] for part in ("query", "key", "value")] if ".qkv." in name else None
    return torch.cat(parts) if parts else wanted[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_flattened_batches_have_the_loss_logits_and_gradients_of_padded_ones(family: str) -> None:
    reference = untouched(family)
    model = flattened(reference)
    for lengths, multiple in (([12, 7, 16, 1], 64), ([3, 9, 1, 2], 8), ([16, 16, 16, 16], 64)):
        inputs = inputs_of(lengths, family)
        expected = reference(**inputs)
        reference.zero_grad()
        expected.loss.backward()
        loss, logits = flattened_loop.classify(model, flattened_loop.flattened(inputs, multiple))
        model.zero_grad()
        loss.backward()
        torch.testing.assert_close((loss, logits), (expected.loss, expected.logits))
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        ours = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_near(ours, {name: gradients_for(name, wanted) for name in ours}, what="gradients")
    if family == "esm":
        with torch.no_grad():
            plain = reference(**{**inputs, "input_ids": inputs["input_ids"].clamp(min=MASK + 1)}).logits
        assert not torch.allclose(plain, expected.logits, atol=1e-3), "the masked tokens change the result"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_all_shapes_share_one_compiled_graph(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the kernel of a GPU; any operator that waits for a GPU's result would break the graph."""

    def attention(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> tuple[Any, None]:
        assert query.dtype == key.dtype == value.dtype, "the kernel takes one dtype"
        return (query + key + value).transpose(1, 2), None

    monkeypatch.setattr(flattened_loop, "varlen_attention", attention)
    model = flattened(untouched(family))
    torch._dynamo.reset()
    before = compile_counts()
    classify = torch.compile(flattened_loop.classify, dynamic=True, fullgraph=True, backend="aot_eager")
    for lengths, multiple in (([12, 7, 16, 1], 64), ([3, 9, 1, 2, 4], 8), ([16] * 9, 128)):
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = classify(model, flattened_loop.flattened(inputs_of(lengths, family), multiple))
        loss.backward()
    assert compile_counts().since(before).graphs == 1


def test_models_that_the_loop_does_not_train_are_refused() -> None:
    with pytest.raises(ConfigError, match="ESM with rotary positions only"):
        flattened_loop.check_model(tiny_model("esm", position_embedding_type="absolute"))
    for family in ("esm", "modernbert"):
        with_dropout = tiny_model(family, attention_dropout=0.25)
        flattened_loop.check_model(with_dropout)
        with pytest.raises(ConfigError, match=r"FA4 has no dropout, and this model's attention has 0\.25"):
            flattened_loop.check_model(with_dropout, fa4=True)
        with pytest.raises(ConfigError, match="heads of at least 64 units, and this model's have 16"):
            flattened_loop.check_model(untouched(family), fa4=True)
        flattened_loop.check_model(untouched(family, **LARGE_HEADS), fa4=True)


@pytest.mark.parametrize("window", [None, 2])
def test_flash_attention_4_is_called_with_the_texts_and_the_window(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the package, which computes text by text."""

    def by_text(*tensors: Any, rows: dict[str, Any]) -> Any:
        """Each text's tensors (heads, T, units), and the weights of its scores: 0, or -inf beyond the window."""
        starts, left = rows["cu_seqlens_q"], rows["window_size_left"]
        assert (left, rows["max_seqlen_q"]) == (rows["window_size_right"], rows["max_seqlen_k"])
        assert rows["max_seqlen_q"] >= starts.diff().max()
        assert rows["cu_seqlens_k"] is starts
        for text in zip(*(x.transpose(0, 1).split(starts.diff().tolist(), 1) for x in tensors), strict=True):
            at = torch.arange(text[0].shape[1])
            far = (at[:, None] - at).abs() > (len(at) if left is None else left)
            yield *text, torch.zeros(far.shape).masked_fill(far, -torch.inf)

    def forward(q: Any, k: Any, v: Any, *, softmax_scale: float, return_lse: bool, **rows: Any) -> Any:
        assert return_lse
        texts = by_text(q, k, v, rows=rows)
        out = torch.cat([(q @ k.mT * softmax_scale + bias).softmax(-1) @ v for q, k, v, bias in texts], 1)
        return out.transpose(0, 1).contiguous(), q.new_zeros(q.shape[1], len(q)), None, None, None

    def backward(*tensors: Any, softmax_scale: float, **rows: Any) -> Any:
        *inputs, sums = tensors  # q, k, v, out and out's gradient
        assert sums.shape == (2, 12)
        gradients = []
        for q, k, v, out, grad, bias in by_text(*inputs, rows=rows):
            weights = (q @ k.mT * softmax_scale + bias).softmax(-1)
            scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * softmax_scale
            gradients.append((scores @ k, scores.mT @ q, weights.mT @ grad))
        return tuple(torch.cat(parts, 1).transpose(0, 1).contiguous() for parts in zip(*gradients, strict=True))

    package = ModuleType("flash_attn.cute")
    package.interface = ModuleType("flash_attn.cute.interface")  # type: ignore[attr-defined]
    package.interface.__dict__.update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    for name, module in (("flash_attn", ModuleType("flash_attn")), ("flash_attn.cute", package)):
        monkeypatch.setitem(sys.modules, name, module)
    starts = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    qkv = torch.randn(12, 3, 2, 8, requires_grad=True)
    arguments = starts, 8, 0.3, window
    torch.library.opcheck(flash_attention_4.flash_attention_4, (*qkv.detach().unbind(1), *arguments))
    out, _ = flash_attention_4.flash_attention_4(*qkv.unbind(1), *arguments)
    query, key, value = (x.transpose(0, 1)[None] for x in qkv.unbind(1))
    sliding = None if window is None else window + 1
    wanted, _ = flattened_loop.varlen_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.3, starts=starts, sliding_window=sliding
    )
    torch.testing.assert_close(out, wanted[0])
    weights = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, qkv, weights)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted[0], qkv, weights)[0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning")  # flash-attn-4's, when it compiles a kernel
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fa4", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_flattened_batches_have_the_loss_and_gradients_of_padded_ones_on_a_gpu(
    family: str, fa4: bool, compiled: bool
) -> None:
    if fa4:
        pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4; see benchmarks/peers/README.md")
    reference = untouched(family, **LARGE_HEADS if fa4 else {}).cuda()
    model = flattened(reference, fa4=fa4).cuda()
    classify = torch.compile(flattened_loop.classify, dynamic=True) if compiled else flattened_loop.classify

    def step(flat: flattened_loop.Flat) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = classify(model, flat)
        loss.backward()
        return loss.detach()

    graphed = flattened_loop.GraphedStep(step, torch.optim.SGD(model.parameters()))
    for lengths in ([12, 7, 16, 1], [3, 9, 1, 2], [16, 16, 16, 16]):  # the first one is not replayed
        inputs = inputs_of(lengths, family)
        with torch.autocast("cuda", torch.bfloat16):
            expected = reference(**{name: value.cuda() for name, value in inputs.items()})
        reference.zero_grad()
        expected.loss.backward()
        loss = graphed(flattened_loop.flattened(inputs, 64))
        torch.testing.assert_close(loss, expected.loss.detach(), atol=0.02, rtol=0.02)
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            gradient = gradients_for(name, wanted)
            if name in WITHOUT_GRADIENT.get(family, []):
                assert parameter.grad is None, name
                assert gradient is None, name
                continue
            # The exact gradients of key biases are zero, so theirs are rounding errors, which came to 2e-4 on an H200.
            least = 1e-3 if name.endswith(("key.bias", "qkv.bias")) else 1e-4
            # ModernBERT's classifier has a bias, whose gradient is a sum of terms of about 0.1 that nearly cancel.
            least = 5e-3 if name == "classifier.bias" else least
            assert (parameter.grad - gradient).norm() <= 0.05 * gradient.norm() + least, name
    assert len(graphed.captured) == 1
