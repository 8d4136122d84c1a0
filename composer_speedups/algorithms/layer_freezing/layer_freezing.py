"""The layer freezing technique: a model's first layers do not train."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_composer
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import FSDP, Order, Technique

if TYPE_CHECKING:
    from composer_speedups.algorithms.layer_freezing.cache import PrefixCache


class LayerFreezing(Technique):
    """Freezes the embeddings and first blocks, so that their backward pass is not computed.

    Their parameters no longer require gradients, so the forward pass stores none of their activations, and the backward
    pass ends after them. Their gradients and their state in the optimizers are freed. Dropout stays as it is.

    With ``cache``, their outputs are computed once for all training samples, without dropout, and every step starts
    behind them.

    Raises:
        Refusal: At INIT, without one encoder of a known family, for more blocks than it has, for embeddings that are
            tied to another module, such as a masked-LM head, or under DDP in a loop of your own; with ``cache``,
            without ``unpadding``, in other loops and on several ranks. At the start of training, with ``cache``, for
            batches that do not say which samples they have (:class:`.IndexedRows`) or that change.

    Source: Lee et al., arXiv 1911.03090.
    """

    name = "layer_freezing"
    order = Order.ADAPTERS
    effect = "recipe"
    not_with: ClassVar = {
        FSDP: "FSDP has already grouped the parameters, and gathers and reduces frozen ones, too",
        "lora": "LoRA already freezes the layers, and layer_freezing would freeze their adapters",
        "sparse_upcycling": "the experts of a frozen layer would remain equal, and its router would not learn",
    }

    layers: Literal["embeddings"] | Annotated[int, Field(ge=1)] = Field("embeddings")
    """embeddings; or a number of blocks, which are frozen together with the embeddings and with everything else that
    computes the blocks' input, such as DeBERTa's relative positions."""

    cache: bool = Field(False)
    """Compute the outputs of the frozen blocks once per sample, without dropout, and keep them in autocast's dtype;
    train.py's batches, and those of IndexedRows, say which samples they have."""

    def reset(self) -> None:
        super().reset()
        self._cached: PrefixCache | None = None
        self._due = False  # whether the cache is to be filled in this fit()

    @property
    def _blocks(self) -> int:
        """The number of blocks to freeze in addition to the embeddings."""
        return self.layers if isinstance(self.layers, int) else 0

    def needs(self, run: Run) -> Iterable[Refusal]:
        if not self.cache:
            return
        yield from needs_composer(self.name, run, "cache")
        others = run.techniques
        if not self._blocks:
            yield self.refusal("cache keeps the outputs of blocks, and none is frozen", "set layers to a number")
        if "unpadding" not in others:
            yield self.refusal("cache keeps packed tokens, and nothing packs them", "add unpadding")
        if run.ranks > 1:
            yield self.refusal(f"cache needs one process, and this run has {run.ranks}", "remove cache")
        if "torch_compile" in others:
            yield self.refusal("cache stops the forward pass behind a block, which compiled code cannot", "remove one")
        if "fused_layers" in others and others["fused_layers"].matmul_precision == "fp8":
            yield self.refusal("cache is filled before the scales of 8-bit layers are learned", "remove one")

    def fit_start(self, run: Run) -> None:
        assert run.state is not None
        self._cached, self._due = None, self.cache
        vars(run.model).pop("prefix_is_cached", None)
        if run.state.timestamp.batch_in_epoch.value:  # a resumed epoch does not start again
            self.epoch_start(run)

    def epoch_start(self, run: Run) -> None:
        """Fill the cache before the first batch, which a ThroughputMonitor counts as warm-up."""
        if not self._due:
            return
        self._due = False
        from composer_speedups.algorithms.layer_freezing.cache import PrefixCache
        from composer_speedups.core.engaging import had_no_effect

        assert run.logger is not None
        started = time.perf_counter()
        try:
            cached = PrefixCache(run, self._blocks)
            run.logger.log_hyperparameters({"layer_freezing/cache": str(cached)})
            cached.fill()
        except Refusal as error:
            had_no_effect(self, error)
            return
        self._cached, vars(run.model)["prefix_is_cached"] = cached, True  # a FinetuneModel counts its FLOPs by it
        run.give_back(setattr, self, "_cached", None)
        run.give_back(vars(run.model).pop, "prefix_is_cached", None)
        self.evidence |= {"cache": str(cached), "cache_seconds": round(time.perf_counter() - started, 2)}

    def before_forward(self, run: Run) -> None:
        from composer_speedups.packing.call import know_batch, known_batch

        if self._cached is not None:
            know_batch(self._cached.give(known_batch()))  # unpadding has counted its rows

    def engage(self, run: Run) -> dict[str, Any]:
        from torch.nn.parallel import DistributedDataParallel

        from composer_speedups.algorithms.layer_freezing.modules import freeze
        from composer_speedups.families.blocks import blocks_of, only_encoder

        if any(isinstance(module, DistributedDataParallel) for module in run.model.modules()):
            reason = "DistributedDataParallel already waits for the gradients of all parameters"
            raise self.refusal(reason, "apply it before DistributedDataParallel wraps the model")
        blocks = len(blocks_of(only_encoder(run.model)))
        if self._blocks > blocks:
            raise self.refusal(
                f"the model has {blocks} blocks, and layers is {self._blocks}", f"set layers to {blocks} or less"
            )
        if self.cache and self._blocks == blocks and "fused_layers" in run.techniques:
            raise self.refusal("cache leaves fused_layers no block to compute", "freeze fewer blocks, or remove it")
        freeze(run.model, run.optimizers, self._blocks)
        return {"layers": self.layers, "blocks": blocks}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        from composer_speedups.algorithms.layer_freezing.modules import first_parameters

        parameters = first_parameters(run.model, self._blocks)
        training = next((n for n, p in parameters.items() if p.requires_grad or p.grad is not None), None)
        if training is not None:
            reason = f"{training} requires gradients or has one, although it is frozen"
            raise self.no_effect(reason, "do not change requires_grad after INIT")
        called = seen.ran["packed_encoder"] * self._blocks
        if self._cached is not None and not seen.ran["cached_block"] == called > 0:
            reason = f"the outputs of {seen.ran['cached_block']} of {called} calls of frozen blocks came from the cache"
            raise self.no_effect(reason, "call the model once per batch, or remove cache")
        blocks = f" and {self._blocks} block{'s' if self._blocks > 1 else ''}" if self._blocks else ""
        return {
            "frozen": f"embeddings{blocks}",
            "frozen_parameters": sum(p.numel() for p in set(parameters.values())),
            "trained_parameters": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        }
