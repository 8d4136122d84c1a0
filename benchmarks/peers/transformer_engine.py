"""python -m benchmarks.peers.transformer_engine -f FILE [key=value ...] [peer.NAME=VALUE ...]: BERT's encoder from
NVIDIA's Transformer Engine, over flattened batches.

The loop is that of :mod:`.flattened_loop`, including its CUDA graph of the whole step per number of tokens, which
leaves the CPU less to do than ``te.make_graphed_callables``. Each layer is a ``te.TransformerLayer`` on packed texts
("thd"): fused attention of cuDNN with dropout, fused bias, dropout and addition, and Transformer Engine's LayerNorm.
Weights are float32 under bf16 autocast, as in the other peers. Its GELU is the tanh form, whatever the config names, so
losses differ slightly from those of the other peers.

- ``peer.graphs``: false launches every kernel from Python. Default true.
- ``peer.multiple``: tokens are rounded up to a multiple of it, in a tail that belongs to no text. FP8 needs multiples
  of 16. Default 256.
- ``peer.float8``: true for FP8 products with delayed scaling (e4m3 forward, e5m2 backward). Default false.
- ``peer.gelu_in_product``: true for bias and GELU in the epilogues of cuBLASLt, which is bf16 only; false for
  Transformer Engine's own kernels. Default false.

Needs a GPU, a BertForSequenceClassification, and the packages transformer-engine-cu13 and transformer-engine-torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification

from benchmarks.peers.flattened_loop import AutocastLayerNorm, Flat, FlattenedLoop, GraphedStep, train
from benchmarks.peers.job import Job, read_arguments
from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.settings import Settings
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.trainer import open_device


class Flags(Settings):
    graphs: bool = True
    multiple: int = Field(256, ge=16, multiple_of=16)
    float8: bool = False
    gelu_in_product: bool = False


def main(arguments: list[str]) -> None:
    config, flags = read_arguments(arguments, Flags)
    device = open_device(config.trainer)
    if torch_device(device).type != "cuda":
        raise ConfigError("trainer.device: Transformer Engine needs a GPU")
    os.environ["NVTE_BIAS_GELU_NVFUSION"] = str(int(not flags.gelu_in_product))
    te = transformer_engine()

    def evidence() -> dict[str, Any]:
        own = {"float8": flags.float8, "gelu": "tanh", "gelu_in_product": flags.gelu_in_product}
        return {"attention": attention_backend(), **own}

    def prepared(job: Job) -> None:
        prepare(job.model.model, te.TransformerLayer)

    train("transformer_engine", config, device, flags, prepared, EngineLoop, evidence)


def transformer_engine() -> Any:
    """Return Transformer Engine's module for PyTorch."""
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # a library or its version is missing
        raise ConfigError(f"peer: Transformer Engine cannot be imported ({first_line(error)})") from error
    return te


def attention_backend() -> str:
    """Return the backend that Transformer Engine chose for the last attention."""
    from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import _attention_backends

    backends = ("fused", "flash", "unfused")
    return next(name for name in backends if _attention_backends[f"use_{name}_attention"])


def check_model(model: Any) -> None:
    """Raise ConfigError for a model that this peer does not train."""
    if not isinstance(model, BertForSequenceClassification) or not model.config.hidden_act.startswith("gelu"):
        raise ConfigError("model.name: this peer trains a BertForSequenceClassification with GELU only")


def prepare(model: Any, layer_class: Any) -> None:
    """Replace a model's encoder layers by Transformer Engine's; parameters keep their values."""
    check_model(model)
    layers = model.bert.encoder.layer
    model.bert.encoder = Encoder([engine_layer(stock, i + 1, layer_class) for i, stock in enumerate(layers)])
    model.bert.embeddings.LayerNorm.__class__ = AutocastLayerNorm


class Encoder(nn.Module):
    """Layers on packed texts: (T, units), with where each text starts and the last one ends, int32 (B + 1)."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, starts: Tensor, longest: int) -> Tensor:
        for layer in self.layer:
            hidden = layer(
                hidden, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
            )
        return hidden


def engine_layer(stock: Any, number: int, layer_class: Any) -> nn.Module:
    """Build a te.TransformerLayer that computes what a BertLayer computes, with the tanh form of GELU."""
    attention, up, down = stock.attention, stock.intermediate.dense, stock.output.dense
    layer: nn.Module = layer_class(
        up.in_features,
        up.out_features,
        attention.self.num_attention_heads,
        layernorm_epsilon=stock.output.LayerNorm.eps,
        hidden_dropout=stock.output.dropout.p,
        attention_dropout=attention.self.dropout.p,
        layer_number=number,
        self_attn_mask_type="padding",
        # Normalize after each addition, and add to what was normalized, as BERT does.
        output_layernorm=True,
        apply_residual_connection_post_layernorm=True,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        activation="gelu",
        attn_input_format="thd",
        params_dtype=torch.float32,
    )
    products = [attention.self.query, attention.self.key, attention.self.value]
    after_attention = attention.output.LayerNorm
    values = {
        "self_attention.qkv.weight": torch.cat([product.weight for product in products]),
        "self_attention.qkv.bias": torch.cat([product.bias for product in products]),
        "self_attention.proj.weight": attention.output.dense.weight,
        "self_attention.proj.bias": attention.output.dense.bias,
        "layernorm_mlp.layer_norm_weight": after_attention.weight,
        "layernorm_mlp.layer_norm_bias": after_attention.bias,
        "layernorm_mlp.fc1_weight": up.weight,
        "layernorm_mlp.fc1_bias": up.bias,
        "layernorm_mlp.fc2_weight": down.weight,
        "layernorm_mlp.fc2_bias": down.bias,
        "layernorm.weight": stock.output.LayerNorm.weight,
        "layernorm.bias": stock.output.LayerNorm.bias,
    }
    parameters = dict(layer.named_parameters())
    if parameters.keys() != values.keys():
        raise ConfigError(f"peer: this Transformer Engine names a layer's parameters otherwise ({sorted(parameters)})")
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    return layer


class EngineLoop(FlattenedLoop):
    """The flattened loop, with an encoder of Transformer Engine's layers."""

    def use(self, flags: Flags, *, on_gpu: bool = True) -> None:
        self.flags = flags
        model: Any = self.model.model
        embed = torch.compile(model.bert.embeddings, dynamic=True)
        self.classify = functools.partial(classify, model, embed, float8 if flags.float8 else contextlib.nullcontext)
        if flags.graphs:
            self.graphed = GraphedStep(self._forward_backward, self.optimizer)


def float8() -> Any:
    """Return a context in which Transformer Engine's products are FP8 with delayed scaling."""
    from transformer_engine.common.recipe import DelayedScaling, Format

    te = transformer_engine()
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    return te.autocast(enabled=True, recipe=recipe)


def classify(model: Any, embed: Any, precision: Any, flat: Flat) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy and the logits (B, classes)."""
    ids, types, positions = flat.tokens[:3, None, :-1].unbind(0)
    starts = flat.starts[:-1]  # the unused tokens belong to no text
    hidden = embed(input_ids=ids, token_type_ids=types, position_ids=positions).squeeze(0)
    with precision():
        hidden = model.bert.encoder(hidden, starts, flat.longest)
    first = hidden.index_select(0, starts[:-1]).unsqueeze(1)
    logits = model.classifier(model.dropout(model.bert.pooler(first)))
    return F.cross_entropy(logits, flat.labels), logits


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
