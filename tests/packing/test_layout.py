"""Plans of real tokens, and gathering and scattering them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from composer_speedups.packing.attention import supports_flash_attention, unpadded_attention
from composer_speedups.packing.layout import Layout, lay_out
from composer_speedups.packing.rows import row_counts
from tests.helpers.masks import random_masks


def test_a_plan_and_its_errors() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 1]])
    assert row_counts(mask) == [2, 0, 2, 2]
    plan = lay_out(mask, 6, 4)
    assert plan.indices_T.tolist() == [0, 1, 6, 8, 10, 11, 12, 12]
    assert plan.cu_seqlens.tolist() == [0, 2, 2, 4, 6, 8]
    assert plan.cu_seqlens.dtype == torch.int32
    assert plan.longest >= 3
    assert lay_out(mask, 6, 3).indices_T.tolist() == [0, 1, 6, 8, 10, 11]
    for wrong in (5, 7, 0, 40):
        with pytest.raises(RuntimeError, match="changed after its tokens were counted"):
            lay_out(mask, wrong, 4)


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_gathering_and_scattering_are_inverse_and_each_others_gradient(multiple: int) -> None:
    """For masks of every kind: real tokens come back to their slots, in double precision and in order."""
    for seed, mask in enumerate(random_masks(36)):
        layout = lay_out(mask, int(mask.sum()), multiple)
        generator = torch.Generator().manual_seed(seed)
        x_BSH = torch.randn(*mask.shape, 3, dtype=torch.double, generator=generator, requires_grad=True)
        packed = layout.gather(x_BSH)
        real = mask.bool()
        torch.testing.assert_close(packed[: int(real.sum())], x_BSH[real], rtol=0, atol=0)
        back = layout.scatter(packed)
        torch.testing.assert_close(back, x_BSH * real[..., None], rtol=0, atol=0)
        weights = torch.randn(back.shape, dtype=torch.double, generator=generator)
        (gradient,) = torch.autograd.grad((back * weights).sum(), x_BSH)
        torch.testing.assert_close(gradient, weights * real[..., None], rtol=0, atol=0)
        assert layout.cu_seqlens.diff()[:-1].tolist() == mask.sum(-1).tolist()
        ids = torch.arange(mask.numel()).view(mask.shape)
        assert layout.pick(ids)[0, : int(real.sum())].tolist() == ids[real].tolist()


class FlashCalls(TorchDispatchMode):
    """Records the windows of flash attention's calls, and the other settings of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any, Any]] = []
        self.settings: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "flash" in str(func):
            name = func.overloadpacket.__name__
            self.seen.append((name, kwargs.get("window_size_left"), kwargs.get("window_size_right")))
            if name == "_flash_attention_forward":
                self.settings = [*args[5:], kwargs.get("scale")]
        return func(*args, **kwargs)


@pytest.mark.parametrize(("sliding_window", "reach"), [(None, None), (5, 4)])
def test_the_flash_call_has_the_right_signature_shapes_and_window(
    sliding_window: int | None, reach: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed: torch's meta kernel checks the call and returns tensors of the right shapes."""
    monkeypatch.setattr("composer_speedups.packing.attention.supports_flash_attention", lambda *_: True)
    meta: dict[str, Any] = {"device": "meta"}
    mask, indices = torch.empty(3, 9, dtype=torch.bool, **meta), torch.empty(64, dtype=torch.long, **meta)
    layout = Layout(mask, indices, torch.empty(5, dtype=torch.int32, **meta), 128)
    query = torch.empty(1, 2, 64, 16, dtype=torch.bfloat16, **meta, requires_grad=True)
    with FlashCalls() as calls:
        output, weights = unpadded_attention(
            nn.Identity(), query, query, query, None, 0.1, 0.25, layout, sliding_window
        )
        output.sum().backward()
    assert (output.shape, output.dtype, weights) == ((1, 64, 2, 16), torch.bfloat16, None)
    assert query.grad is not None
    assert query.grad.shape == query.shape
    names = ["_flash_attention_forward", "_flash_attention_backward"]
    longest, dropout, causal, debug_mask = 128, 0.1, False, False
    assert calls.settings == [longest, longest, dropout, causal, debug_mask, 0.25]
    assert calls.seen == [(name, reach, reach) for name in names]


@pytest.mark.exhaustive
def test_shared_key_heads_of_as_many_tokens_as_query_heads() -> None:
    """Two key heads serve four query heads; sizes that are equal by chance must not be mistaken for each other."""
    layout = lay_out(torch.ones(2, 2, dtype=torch.long), 4, 1)
    query, key, value = (torch.randn(1, heads, 4, 8) for heads in (4, 2, 2))
    output, _ = unpadded_attention(nn.Identity(), query, key, value, None, layout=layout)
    rows = [x.repeat_interleave(4 // x.shape[1], 1).view(4, 2, 2, 8) for x in (query, key, value)]  # (A, B, S, D)
    expected = nn.functional.scaled_dot_product_attention(*rows).view(4, 4, 8).transpose(0, 1)
    torch.testing.assert_close(output[0], expected)


def test_the_flash_kernel_needs_a_gpu_half_precision_and_a_supported_head_size() -> None:
    assert not supports_flash_attention(torch.device("cpu"), torch.bfloat16, 64)
    assert not supports_flash_attention(torch.device("cuda"), torch.float32, 64)
    assert not supports_flash_attention(torch.device("cuda"), torch.bfloat16, 20)


@pytest.mark.parametrize(("width", "multiple"), [(9, 1), (9, 256), (128, 64), (129, 64), (200, 64)])
def test_longest_covers_every_row_and_is_a_multiple_of_128(width: int, multiple: int) -> None:
    """The kernels read ``longest`` tokens per row, including the row of filler tokens at the end of T."""
    mask = torch.ones(1, width, dtype=torch.long)
    mask[0, 1:] = multiple <= width  # one real token, all others are filler
    plan = lay_out(mask, int(mask.sum()), multiple)
    assert plan.longest >= int(plan.cu_seqlens.diff().max())
    assert plan.longest % 128 == 0
    assert plan.longest - max(width, multiple) < 128
