"""The peer of Transformer Engine computes what BERT with the tanh form of GELU computes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification

from benchmarks.peers import transformer_engine as peer
from benchmarks.peers.flattened_loop import GraphedStep, flattened
from composer_speedups.core.errors import ConfigError
from tests.helpers.common import batch, tiny_config
from tests.helpers.models import tiny_model
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near


class Names(nn.Module):
    """A module with the named parameters, all zeros."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class DocumentedLayer(nn.Module):
    """te.TransformerLayer without dropout as its documentation describes it, for the arguments that the peer gives."""

    def __init__(self, units: int, inner: int, heads: int, **arguments: Any) -> None:
        super().__init__()
        self.units, self.heads, self.arguments = units, heads, arguments
        self.self_attention = nn.Module()
        self.self_attention.qkv = nn.Linear(units, 3 * units)
        self.self_attention.proj = nn.Linear(units, units)
        shapes = {
            "fc1_weight": (inner, units),
            "fc1_bias": (inner,),
            "fc2_weight": (units, inner),
            "fc2_bias": (units,),
        }
        self.layernorm_mlp = Names(layer_norm_weight=(units,), layer_norm_bias=(units,), **shapes)
        self.layernorm = nn.LayerNorm(units)

    def forward(self, x: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int, **_: Any) -> Tensor:
        assert cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q >= cu_seqlens_q.diff().max()
        eps, mlp, end = self.arguments["layernorm_epsilon"], self.layernorm_mlp, int(cu_seqlens_q[-1])
        q, k, v = self.self_attention.qkv(x).view(-1, 3, self.heads, self.units // self.heads).unbind(1)
        texts = zip(*(y[:end].split(cu_seqlens_q.diff().tolist()) for y in (q, k, v)), strict=True)
        attended = [
            F.scaled_dot_product_attention(*(y.transpose(0, 1) for y in text)).transpose(0, 1) for text in texts
        ]
        context = F.pad(torch.cat(attended).flatten(1), (0, 0, 0, len(x) - end))  # zeros in the tail
        x = x + self.self_attention.proj(context)
        x = F.layer_norm(x, (self.units,), mlp.layer_norm_weight, mlp.layer_norm_bias, eps)
        inner = F.gelu(F.linear(x, mlp.fc1_weight, mlp.fc1_bias), approximate="tanh")
        x = x + F.linear(inner, mlp.fc2_weight, mlp.fc2_bias)
        return F.layer_norm(x, (self.units,), self.layernorm.weight, self.layernorm.bias, eps)


def untouched(**settings: Any) -> Any:
    """A BERT without dropout, with the tanh form of GELU, and with biases and norms that are not 0 and 1."""
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = tiny_config(initializer_range=0.2, hidden_act="gelu_pytorch_tanh", **rates)
    config.update(settings)
    model = BertForSequenceClassification._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def in_bert(name: str) -> list[str]:
    """The names in BERT of the parameters of which one of the peer's consists."""
    for theirs, stock in {
        "self_attention.qkv.": "attention.self.{}.",
        "self_attention.proj.": "attention.output.dense.",
        "layernorm_mlp.layer_norm_": "attention.output.LayerNorm.",
        "layernorm_mlp.fc1_": "intermediate.dense.",
        "layernorm_mlp.fc2_": "output.dense.",
        "layernorm.": "output.LayerNorm.",
    }.items():
        if theirs in name:
            name = name.replace(theirs, stock)
            return [name.format(part) for part in ("query", "key", "value")] if "{}" in name else [name]
    return [name]


def in_names_of(model: nn.Module, of_bert: dict[str, Tensor]) -> dict[str, Tensor]:
    """BERT's gradients, joined as the peer joins its parameters."""
    return {name: torch.cat([of_bert[part] for part in in_bert(name)]) for name, _ in model.named_parameters()}


def test_packed_batches_have_the_loss_logits_and_gradients_of_padded_ones() -> None:
    reference, model = untouched(), untouched()
    peer.prepare(model, DocumentedLayer)
    for lengths in ([12, 7, 16, 1], [3, 9, 1, 2], [16, 16, 16, 16]):
        inputs = batch(lengths, 16)
        expected = reference(**inputs)
        reference.zero_grad()
        expected.loss.backward()
        flat = flattened(inputs, 16)
        loss, logits = peer.classify(model, model.bert.embeddings, contextlib.nullcontext, flat)
        model.zero_grad()
        loss.backward()
        torch.testing.assert_close((loss, logits), (expected.loss, expected.logits))
        assert len(gradients(model)) == len(list(model.parameters()))
        assert_near(gradients(model), in_names_of(model, gradients(reference)))


def test_layers_get_berts_dropout_and_its_order_of_norms() -> None:
    model = untouched()
    for layer, rate in zip(model.bert.encoder.layer, (0.1, 0.2), strict=True):
        layer.attention.self.dropout.p, layer.output.dropout.p = rate, 2 * rate
    peer.prepare(model, DocumentedLayer)
    for number, layer in enumerate(model.bert.encoder.layer, 1):
        arguments = layer.arguments
        assert (arguments["layer_number"], arguments["layernorm_epsilon"]) == (number, 1e-12)
        assert (arguments["attention_dropout"], arguments["hidden_dropout"]) == (number / 10, number / 5)
        assert arguments["output_layernorm"]
        assert arguments["apply_residual_connection_post_layernorm"]
        assert not arguments["qkv_weight_interleaved"]


def test_other_models_and_activations_are_refused() -> None:
    for model in (tiny_model("esm"), untouched().bert):
        with pytest.raises(ConfigError, match="trains a BertForSequenceClassification with GELU only"):
            peer.prepare(model, DocumentedLayer)
    model = untouched()
    model.config.hidden_act = "relu"
    with pytest.raises(ConfigError, match="with GELU only"):
        peer.prepare(model, DocumentedLayer)


@pytest.mark.gpu
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("gelu_in_product", [False, True])
def test_packed_batches_have_the_loss_and_gradients_of_padded_ones_on_a_gpu(
    float8: bool, gelu_in_product: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = "needs transformer-engine-cu13 and transformer-engine-torch"
    te = pytest.importorskip("transformer_engine.pytorch", reason=needs, exc_type=Exception)
    monkeypatch.setenv("NVTE_BIAS_GELU_NVFUSION", str(int(not gelu_in_product)))
    # Heads of 64, as BERT's. Larger weights would amplify rounding errors.
    shape = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "initializer_range": 0.1}
    reference, model = untouched(**shape).cuda(), untouched(**shape)
    peer.prepare(model, te.TransformerLayer)
    model.cuda()
    precision = peer.float8 if float8 else contextlib.nullcontext

    def step(flat: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = peer.classify(model, model.bert.embeddings, precision, flat)
        loss.backward()
        return loss.detach()

    graphed = GraphedStep(step, torch.optim.SGD(model.parameters()))
    near = 0.1 if float8 else 0.02
    for lengths in ([12, 7, 16, 1], [3, 9, 1, 2], [16, 16, 16, 16]):
        inputs = batch(lengths, 16)
        expected = reference(**{name: value.cuda() for name, value in inputs.items()})  # in float32
        reference.zero_grad()
        expected.loss.backward()
        for _ in range(3):  # the first call is not replayed, and begins with FP8 scales of 1
            loss = graphed(flattened(inputs, 64))
        torch.testing.assert_close(loss, expected.loss.detach(), atol=near, rtol=near)
        exact = in_names_of(model, gradients(reference))
        errors = {name: (gradient - exact[name]).norm() for name, gradient in gradients(model).items()}
        if float8:  # of some biases, whose sums nearly cancel, the gradients are rounding errors
            assert sum(e**2 for e in errors.values()) <= 0.5**2 * sum(g.norm() ** 2 for g in exact.values())
            continue
        for name, error in errors.items():
            # The exact gradients of key biases are zero, so theirs are rounding errors.
            least = 1e-3 if name.endswith("qkv.bias") else 1e-4
            assert error <= 0.1 * exact[name].norm() + least, name
    assert len(graphed.captured) == 1
    assert peer.attention_backend() == "fused"
