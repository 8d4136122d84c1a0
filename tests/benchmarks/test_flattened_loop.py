"""The flattened loop computes what the padded model computes, and its CUDA graphs replay that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from benchmarks.peers import flattened_loop
from tests.helpers.common import batch, tiny_bert


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layers", [False, True])
def test_flattened_batches_have_the_loss_and_gradients_of_padded_ones_on_a_gpu(compiled: bool, layers: bool) -> None:
    reference: Any = tiny_bert()
    reference.cuda()
    model = copy.deepcopy(reference)
    AttentionInterface.register(flattened_loop.ATTENTION, flattened_loop.varlen_attention)
    AttentionMaskInterface.register(flattened_loop.ATTENTION, lambda *_, **__: None)
    model.set_attn_implementation(flattened_loop.ATTENTION)
    flags = flattened_loop.Flags(compiled, graphs=True, one_product=layers, bf16_layernorm=layers)
    flattened_loop.prepare(model, flags)
    model.cuda()
    classify = torch.compile(flattened_loop.classify, dynamic=True) if compiled else flattened_loop.classify

    def step(flat: flattened_loop.Flat) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = classify(model, flat)
        loss.backward()
        return loss.detach()

    graphed = flattened_loop.GraphedStep(step, torch.optim.SGD(model.parameters()))
    for lengths in ([12, 7, 16, 1], [3, 9, 1, 2], [16, 16, 16, 16]):  # the first one is not replayed
        inputs = batch(lengths, 16)
        with torch.autocast("cuda", torch.bfloat16):
            expected = reference(**{name: value.cuda() for name, value in inputs.items()})
        reference.zero_grad()
        expected.loss.backward()
        loss = graphed(flattened_loop.flattened(inputs, 64))
        torch.testing.assert_close(loss, expected.loss.detach(), atol=0.02, rtol=0.02)
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            parts = [wanted[name.replace("qkv", part)] for part in ("query", "key", "value")] if "qkv" in name else None
            gradient = torch.cat(parts) if parts else wanted[name]
            # The exact gradients of key biases are zero, so theirs are rounding errors, which came to 2e-4 on an H200.
            least = 1e-3 if name.endswith(("key.bias", "qkv.bias")) else 1e-4
            assert (parameter.grad - gradient).norm() <= 0.05 * gradient.norm() + least, name
    assert len(graphed.captured) == 1
