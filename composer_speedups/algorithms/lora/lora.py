"""The LoRA technique: trains low-rank adapters and the classifier of a frozen model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_package
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import NOT_YET, Order, Technique

_MAX_RANK = 4096  # larger than the hidden size of any BERT


class LoRA(Technique):
    """Freezes the base model, and trains low-rank adapters (PEFT) and the whole classifier.

    Raises:
        Refusal: At INIT, without PEFT, if a target does not match, or if the model has other adapters.

    Sources: Hu et al., arXiv 2106.09685; PEFT; for adapters on all Linear modules, Schulman et al., "LoRA Without
    Regret", Thinking Machines Lab, 2025.
    """

    name = "lora"
    order = Order.ADAPTERS
    effect = "recipe"
    not_with: ClassVar = {
        "sparse_upcycling": "LoRA freezes the experts and the router, so the experts would remain equal"
    }

    rank: int = Field(8, ge=1, le=_MAX_RANK)
    """Rank of the adapters."""
    alpha: float = Field(16.0, gt=0)
    """The adapters' output is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = Field("all-linear")
    """Name suffixes of the Linear modules to adapt; all-linear for all of them except for the head."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters' input."""
    modules_to_save: list[str] | None = Field(None)
    """Modules to train in full; null for the classification head, and for none in a masked LM, whose head is
    pretrained."""

    @staticmethod
    def required_on_load() -> bool:
        return True

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from needs_package(self.name, "peft", ".[lora]")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.lora.modules import adapted_layers, adapter_host, add_adapters, trained_copies

        settings = {n: getattr(self, n) for n in ("rank", "alpha", "targets", "dropout", "modules_to_save")}
        add_adapters(run.model, run.optimizers, **settings)
        inner = adapter_host(run.model)
        return {
            "modules": len(adapted_layers(inner)),
            "trained_whole": ", ".join(trained_copies(inner)),
            "trainable_parameters": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
            "total_parameters": sum(p.numel() for p in run.model.parameters()),
        }

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        from composer_speedups.algorithms.lora.modules import ADAPTER, adapted_layers

        fix = "do not change requires_grad, the adapters and the optimizer after INIT"
        adapters = [layer.lora_B[ADAPTER].weight for layer in adapted_layers(run.model).values()]  # zeros at first
        gradients = [p.grad for p in adapters if p.grad is not None and bool(p.grad.count_nonzero())]
        if not gradients and not seen.moved:
            raise self.no_effect("no adapter got a gradient", fix)
        evidence = {"adapters_with_gradient": len(gradients)}
        if seen.moved is None:
            return evidence if seen.ended else NOT_YET  # the learning rate warms up from 0
        if seen.moved == 0:
            unknown = "pass apply the optimizer, or make the optimizer after it"
            raise self.no_effect("no step changed an adapter", fix if run.optimizers else unknown)
        return {**evidence, "parameters_moved": seen.moved}

    def export(self, run: Run, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Save the adapters in ``adapter/`` next to ``folder``, and return the merged weights."""
        from composer_speedups.algorithms.lora.modules import adapter_host, merged_state_dict, save_adapter

        inner = adapter_host(run.model)
        save_adapter(inner, folder.parent / "adapter", weights)
        return merged_state_dict(inner, weights)
