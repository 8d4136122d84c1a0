"""The bitsandbytes technique: AdamW with 8-bit or 32-bit state, optionally paged and with a stable embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from composer.core import State
from pydantic import Field
from torch.optim import Optimizer

from composer_speedups.algorithms.bnb_optimizer.functional import apply_bnb_optimizer, page_again, paged_tensors
from composer_speedups.algorithms.bnb_optimizer.stable_embedding import folded_weights, stable_embeddings
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.core.requirements import Context, Requirement, needs_cuda, needs_package
from composer_speedups.core.technique import Conflict, Exactness, Variant
from composer_speedups.core.trainer_state import model_of


class BnbOptimizer(OptimizerSwapTechnique):
    """Uses bitsandbytes' AdamW; by default, embeddings keep 32-bit state.

    Raises:
        TechniqueError: At INIT, without bitsandbytes, for paged state without a GPU, or with an unsuitable optimizer or
            model.
        NotEngagedError: After the first batch, if no parameter has state with the requested bits, embeddings have other
            bits, nothing is paged, or the stable embedding was not trained.
    """

    name = "bnb_optimizer"
    exactness = "recipe"
    purpose = "saves memory"
    conflicts = (
        *OptimizerSwapTechnique.conflicts,
        Conflict(
            "lora",
            "lora freezes the word embedding, and a stable embedding (stable_embedding: true) must be trained",
            when=lambda bnb, lora: bnb.stable_embedding,
        ),
    )
    gain = 1.02
    trials = (Variant({"bits": 32}), Variant({"bits": 8}))

    bits: Literal[8, 32] = Field(8)
    """Bits per value of each moment; 32 is AdamW up to rounding."""
    paged: bool = Field(False)
    """Keep the state in paged memory; needs a GPU."""
    stable_embedding: bool = Field(False)
    """Add a LayerNorm to the word embedding, as the paper on 8-bit optimizers recommends."""
    embeddings_32bit: bool = Field(True)
    """Keep 32-bit state for embeddings."""
    min_8bit_size: int = Field(4096, ge=0)
    """Minimum number of values of a parameter with 8-bit state."""

    @classmethod
    def exactness_with(cls, settings: Mapping[str, Any], device: str | None) -> Exactness:
        return "rounding" if settings.get("bits") == 32 and not settings.get("stable_embedding") else "recipe"

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("bitsandbytes", ".[bnb]")
        if self.paged:
            yield needs_cuda(context, "paged optimizer state")

    def swap(self, state: State) -> Optimizer:
        settings = (self.bits, self.paged, self.stable_embedding, self.embeddings_32bit, self.min_8bit_size)
        return apply_bnb_optimizer(state.model, state.optimizers[0], *settings)

    def after_load(self, state: State) -> None:
        super().after_load(state)
        if self.paged:
            page_again(self._new)

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        embedding_bits = 32 if self.embeddings_32bit else None
        evidence = self.quantised_state(optimizer, state.model, self.bits, embedding_bits, "min_8bit_size")
        if self.paged:
            evidence["paged_tensors"] = len(paged_tensors(optimizer))
            if not evidence["paged_tensors"]:
                raise self.not_engaged("no state tensor is paged", "set paged=False: no tensor has 100,000 values")
        if self.stable_embedding:
            norms = {name: embedding.norm for name, embedding in stable_embeddings(state.model).items()}
            evidence["stable_embedding"] = [name for name, norm in norms.items() if optimizer.state.get(norm.weight)]
            if not evidence["stable_embedding"]:
                raise self.not_engaged("no stable embedding was trained", "set stable_embedding=False")
        return evidence

    def export(self, state: State, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        return folded_weights(model_of(state).model, weights) if self.stable_embedding else weights
