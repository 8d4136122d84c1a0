"""python -m benchmarks.peers.flattened_loop -f FILE [key=value ...] [peer.NAME=VALUE ...]: the loop that an expert
writes over flattened batches, without this package's techniques.

The real tokens of a batch become one row without padding, positions start again with every text, and attention is
torch's variable-length flash attention with dropout, registered as an attention implementation of transformers. On a
GPU the loop uses bf16 autocast, TF32, fused AdamW, torch.compile with dynamic shapes and one CUDA graph of the forward
and backward pass per number of tokens. Each batch is one copy from pinned memory, and nothing waits for the GPU. The
job is that of the config; ``algorithms`` and ``trainer.precision`` are ignored.

``peer.graphs=false`` launches every kernel from Python. Tokens are rounded up to a multiple of ``peer.multiple`` (512):
matmuls are slow at odd numbers, and a smaller multiple means more graphs. ``peer.attention=FA4`` takes the attention of
the package flash-attn-4, for models without dropout in their attention.

On a CPU, attention runs text by text. The model must be a BertForSequenceClassification, a
ModernBertForSequenceClassification, or an EsmForSequenceClassification with rotary positions, such as ESM-2.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from composer.devices import Device
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import (
    BertForSequenceClassification,
    EsmForSequenceClassification,
    ModernBertForSequenceClassification,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.esm.modeling_esm import apply_rotary_pos_emb

from benchmarks.peers.bare_loop import Loop
from benchmarks.peers.flash_attention_4 import check_package, flash_attention_4
from benchmarks.peers.job import Job, build_job, plan_of, read_arguments, set_attention
from benchmarks.peers.meter import Meter
from composer_speedups.core.compile_counts import compile_counts, count_capture
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.settings import Settings
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import RunFolder
from composer_speedups.train.trainer import build_optimizer, open_device

ATTENTION = "torch_varlen"
MODELS = (BertForSequenceClassification, EsmForSequenceClassification, ModernBertForSequenceClassification)


class Flags(Settings):
    attention: Literal["torch", "FA4"] = "torch"
    graphs: bool = True
    multiple: int = Field(512, ge=1)


def main(arguments: list[str]) -> None:
    config, flags = read_arguments(arguments, Flags)
    device = open_device(config.trainer)
    attend = varlen_attention
    if flags.attention == "FA4":
        check_package(torch_device(device))
        attend = functools.partial(varlen_attention, fa4=True)
    register_attention(attend)

    def prepared(job: Job) -> None:
        check_model(job.model.model, fa4=flags.attention == "FA4")
        set_attention(job.model, ATTENTION)
        prepare(job.model.model, attend)

    train("flattened_loop", config, device, flags, prepared, FlattenedLoop, lambda: {"attention": flags.attention})


def register_attention(attend: Callable[..., Any]) -> None:
    """Let transformers' models attend by :func:`varlen_attention`, without a mask."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


def train(
    peer: str,
    config: Config,
    device: Device,
    flags: Any,
    prepare: Callable[[Job], None],
    loop_class: type[FlattenedLoop],
    evidence: Callable[[], dict[str, Any]],
) -> None:
    """Train the job of a config over flattened batches, and write the report."""
    on_gpu = torch_device(device).type == "cuda"
    config.algorithms = {}
    torch.set_float32_matmul_precision("high")
    if on_gpu:
        torch.set_num_threads(1)  # waking threads takes longer than flattening a batch
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=on_gpu)
        prepare(job)
        model = job.model.to(torch_device(device))
        optimizer = build_optimizer(model, config.optimizer)
        for group in optimizer.param_groups:
            group["fused"] = on_gpu
        before = compile_counts()
        meter = Meter(config, model, device, "amp_bf16" if on_gpu else "fp32")
        loop = loop_class(config, job, optimizer, meter)
        loop.use(flags, on_gpu=on_gpu)
        loop.fit(plan_of(config, len(job.train)))
        graphs = compile_counts().since(before).graphs
        captured = len(loop.graphed.captured) if loop.graphed is not None else 0
        meter.write(folder, peer, {**evidence(), "graphs": graphs, "cuda_graphs": captured})


def check_model(model: Any, *, fa4: bool = False) -> None:
    """Raise ConfigError for a model that the loop does not train, or not with FA4."""
    if isinstance(model, EsmForSequenceClassification) and model.config.position_embedding_type != "rotary":
        raise ConfigError("model.name: the flattened loop trains ESM with rotary positions only, such as ESM-2")
    if not isinstance(model, MODELS):
        *kinds, last = (kind.__name__ for kind in MODELS)
        names = f"{', '.join(kinds)} and {last}"
        raise ConfigError(f"model.name: the flattened loop trains {names} only, not {type(model).__name__}")
    if not fa4:
        return
    rates = [getattr(model.config, name, 0) for name in ("attention_probs_dropout_prob", "attention_dropout")]
    if any(rates):
        raise ConfigError(f"peer.attention: FA4 has no dropout, and this model's attention has {max(rates)}")
    # With heads of 16 units, FA4's gradients were wrong by a third on an H200; with 64, they are right.
    if (units := model.config.hidden_size // model.config.num_attention_heads) < 64:
        raise ConfigError(f"peer.attention: FA4 is used for heads of at least 64 units, and this model's have {units}")


def prepare(model: Any, attend: Callable[..., Any] | None = None) -> None:
    """Change a model's layers; parameters keep their values."""
    if not isinstance(model, ModernBertForSequenceClassification):  # whose layers have one matmul already
        for layer in model.base_model.encoder.layer:
            layer.attention.self = SelfAttention(layer.attention.self, attend or varlen_attention)
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = AutocastLayerNorm


class SelfAttention(nn.Module):
    """The self-attention of BERT or ESM with one matmul for query, key and value."""

    def __init__(self, stock: Any, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.rate: float = getattr(stock.dropout, "p", stock.dropout)  # BERT has a module, ESM a number
        self.heads, self.size = stock.num_attention_heads, stock.attention_head_size
        products = [stock.query, stock.key, stock.value]
        self.qkv = nn.Linear(products[0].in_features, 3 * products[0].out_features)
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([product.weight for product in products]))
            self.qkv.bias.copy_(torch.cat([product.bias for product in products]))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        heads = self.qkv(hidden_states).unflatten(-1, (3, self.heads, self.size))
        query, key, value = (x.transpose(1, 2) for x in heads.unbind(-3))
        if position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings, unsqueeze_dim=1)
        dropout, scaling = self.rate if self.training else 0.0, self.size**-0.5
        out, _ = self.attend(self, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out.flatten(2), None


class AutocastLayerNorm(nn.LayerNorm):
    """LayerNorm that returns autocast's dtype. The statistics are float32, as in every LayerNorm of torch."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
            # The residual stream of a pre-norm model is float32, and is not rounded before its norms.
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(dtype)


class FlattenedLoop(Loop):
    """The loop of :mod:`.bare_loop`, with batches of one row."""

    classify: Any
    flags: Any
    graphed: GraphedStep | None = None

    def use(self, flags: Any, *, on_gpu: bool) -> None:
        self.flags = flags
        self.classify = functools.partial(classify, self.model.model)
        if on_gpu:
            self.classify = torch.compile(self.classify, dynamic=True)
        if on_gpu and flags.graphs:
            self.graphed = GraphedStep(self._forward_backward, self.optimizer)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
        flat = flattened(batch, self.flags.multiple)
        flat = flat._replace(tokens=flat.tokens.to(self.device, non_blocking=True))
        loss, logits = self._classify(flat)
        return {"loss": loss, "logits": logits}, flat.labels

    def _classify(self, flat: Flat) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            result: tuple[Tensor, Tensor] = self.classify(flat)
            return result

    def _forward_backward(self, flat: Flat) -> Tensor:
        loss, _ = self._classify(flat)
        loss.backward()
        return loss.detach()

    def _step(self, batch: Mapping[str, Tensor]) -> Tensor:
        if self.graphed is None:
            return super()._step(batch)
        loss = self.graphed(flattened(batch, self.flags.multiple))
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm)
        self.optimizer.step()
        return loss


class Flat(NamedTuple):
    """A batch of B texts as one row of T tokens, the last of which are unused.

    Attributes:
        tokens: int64 (4, T + 1): token ids, token types and positions, each followed by an unused slot; the last row
            holds where each text starts and the last one ends (B + 1), then T, then the labels (B).
        rows: B.
        longest: A bound on the tokens of a text.
    """

    tokens: Tensor
    rows: int
    longest: int

    @property
    def starts(self) -> Tensor:
        """int32 (B + 2); the unused tokens are a text of their own."""
        return self.tokens[3, : self.rows + 2].to(torch.int32)

    @property
    def labels(self) -> Tensor:
        return self.tokens[3, self.rows + 2 : 2 * self.rows + 2]


def flattened(batch: Mapping[str, Tensor], multiple: int) -> Flat:
    """Flatten a padded batch (B, S) on the CPU; the number of tokens is rounded up to a multiple."""
    real = batch["attention_mask"].bool()
    rows, slots = real.shape
    ends = real.sum(-1).cumsum(0)
    total = int(ends[-1])
    size = -(-max(total, 2 * rows + 1) // multiple) * multiple
    tokens = torch.zeros(4, size + 1, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    tokens[0, :total] = batch["input_ids"][real]
    if "token_type_ids" in batch:
        tokens[1, :total] = batch["token_type_ids"][real]
    tokens[2, :total] = torch.arange(slots).expand_as(real)[real]
    tokens[3, 1 : rows + 1] = ends
    tokens[3, rows + 1] = size
    tokens[3, rows + 2 : 2 * rows + 2] = batch["labels"]
    return Flat(tokens, rows, max(slots, multiple))


class GraphedStep:
    """A step's forward and backward pass as CUDA graphs, one per shape, captured after the shape was computed once.

    Every graph has gradients of its own, which the parameters get after its replay.
    """

    def __init__(self, step: Callable[[Flat], Tensor], optimizer: Optimizer) -> None:
        self.step, self.captured = step, {}  # type: ignore[var-annotated]
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, flat: Flat) -> Tensor:
        shape = (flat.tokens.shape, flat.rows, flat.longest)
        if shape not in self.captured:
            return self._compute_and_capture(flat)
        graph, static, gradients, loss = self.captured[shape]
        static.copy_(flat.tokens, non_blocking=True)
        graph.replay()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        result: Tensor = loss
        return result

    def _compute_and_capture(self, flat: Flat) -> Tensor:
        static = flat.tokens.cuda()
        on_gpu = flat._replace(tokens=static)
        self._forget_gradients()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(on_gpu)
        torch.cuda.current_stream().wait_stream(self.stream)
        computed = [parameter.grad for parameter in self.parameters]
        self._forget_gradients()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        count_capture()  # counted as warm-up, as the fast set's captures
        # On the stream of the first pass, whose AccumulateGrad nodes may still live: torch warns of another one.
        # The loader's thread may pin memory meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            graphs_loss = self.step(on_gpu)
        gradients = [parameter.grad for parameter in self.parameters]
        self.captured[(static.shape, flat.rows, flat.longest)] = graph, static, gradients, graphs_loss
        for parameter, gradient in zip(self.parameters, computed, strict=True):
            parameter.grad = gradient
        return loss

    def _forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def classify(model: Any, flat: Flat) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy and the logits (B, classes)."""
    starts, family = flat.starts, model.config.model_type
    ids, types, positions = flat.tokens[:3, None, :-1].unbind(0)
    inputs: dict[str, Any] = {"position_ids": positions, "starts": starts, "longest": flat.longest}
    if family == "esm":
        inputs["inputs_embeds"] = embedded_proteins(model.esm.embeddings, ids, starts)
    else:
        inputs |= {"input_ids": ids} | ({"token_type_ids": types} if family == "bert" else {})
    hidden = model.base_model(**inputs).last_hidden_state.squeeze(0)
    if family == "modernbert" and model.config.classifier_pooling == "mean":
        sums = hidden.new_zeros(len(starts) - 1, hidden.shape[-1], dtype=torch.float32)
        sums = sums.index_add(0, text_of_tokens(starts, len(hidden)), hidden.float())
        first = (sums / starts.diff().unsqueeze(1))[:-1].to(hidden.dtype)
    else:
        first = hidden.index_select(0, starts[:-2])
    if family == "bert":
        first = model.dropout(model.bert.pooler(first.unsqueeze(1)))
    elif family == "esm":
        first = first.unsqueeze(1)
    else:
        first = model.drop(model.head(first))
    logits = model.classifier(first)
    return F.cross_entropy(logits, flat.labels), logits


def text_of_tokens(starts: Tensor, tokens: int) -> Tensor:
    """The number of each token's text, (T,)."""
    return torch.bucketize(torch.arange(tokens, device=starts.device), starts[1:], right=True)


def embedded_proteins(embeddings: Any, ids: Tensor, starts: Tensor) -> Tensor:
    """Embed ids (1, T) as EsmEmbeddings does, which scales each text by its share of masked tokens."""
    embedded = embeddings.word_embeddings(ids)
    if embeddings.token_dropout:
        masked = ids == embeddings.mask_token_id
        masked_before = F.pad(masked.squeeze(0).cumsum(0), (1, 0)).index_select(0, starts)
        share = masked_before.diff() / starts.diff()
        scale = (1 - 0.15 * 0.8) / (1 - share)  # relative to the share in ESM's pre-training
        scale = scale.index_select(0, text_of_tokens(starts, ids.shape[1])).unsqueeze(-1)
        embedded = embedded.masked_fill(masked.unsqueeze(-1), 0.0) * scale
    return embedded if embeddings.layer_norm is None else embeddings.layer_norm(embedded)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    starts: Tensor | None = None,
    longest: int = 0,
    sliding_window: int | None = None,
    fa4: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention (1, heads, T, units) → (1, T, heads, units), in which each token attends to those of its own text, or
    to those of them that are nearer than ``sliding_window``."""
    assert starts is not None
    if not query.is_cuda:
        texts = (x.split(starts.diff().tolist(), dim=2) for x in (query, key, value))
        results = [
            F.scaled_dot_product_attention(q, k, v, near(q.shape[2], sliding_window), dropout, scale=scaling)
            for q, k, v in zip(*texts, strict=True)
        ]
        return torch.cat(results, dim=2).transpose(1, 2), None
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    window = None if sliding_window is None else sliding_window - 1  # the largest distance on either side
    if fa4:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return flash_attention_4(q, k, v, starts, longest, scaling, window)[0].unsqueeze(0), None
    rows = starts, starts, longest, longest
    windows = {"window_size_left": window, "window_size_right": window}
    attended = torch.ops.aten._flash_attention_forward(q, k, v, *rows, dropout, False, False, scale=scaling, **windows)
    return attended[0].unsqueeze(0), None


def near(tokens: int, sliding_window: int | None) -> Tensor | None:
    """The pairs of tokens that attend to each other, (T, T); None for all."""
    if sliding_window is None:
        return None
    positions = torch.arange(tokens)
    return (positions[:, None] - positions).abs() < sliding_window


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
