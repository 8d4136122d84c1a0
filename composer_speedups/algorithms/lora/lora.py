"""The LoRA technique: trains low-rank adapters and the classifier of a frozen model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_package
from composer_speedups.core.technique import NOT_YET, Order, Technique

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn import Parameter

    from composer_speedups.core.run import FirstBatch, Run

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

    def reset(self) -> None:
        super().reset()
        self._frozen: dict[str, Tensor] = {}  # sums of the frozen weights when training began

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from needs_package(self.name, "peft", ".[lora]")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.lora.modules import (
            adapted_layers,
            adapter_host,
            add_adapters,
            trained_and_frozen,
            trained_copies,
        )

        settings = {n: getattr(self, n) for n in ("rank", "alpha", "targets", "dropout", "modules_to_save")}
        try:
            add_adapters(run.model, run.optimizers, **settings)
        except ValueError as error:
            raise self.refusal(str(error), "remove it for this model") from error
        inner = adapter_host(run.model)
        trained, frozen = trained_and_frozen(inner)
        self.fit_start(run)
        return {
            "modules": len(adapted_layers(inner)),
            "trained_whole": ", ".join(trained_copies(inner)),
            "trainable_parameters": sum(p.numel() for p in trained.values()),
            "total_parameters": sum(p.numel() for p in (*trained.values(), *frozen.values())),
        }

    def fit_start(self, run: Run) -> None:
        from composer_speedups.algorithms.lora.modules import adapter_host, sums, trained_and_frozen

        self._frozen = sums(trained_and_frozen(adapter_host(run.model))[1])  # after a checkpoint was loaded

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        """Adapters have gradients and changed; frozen weights do not and did not."""
        import torch

        from composer_speedups.algorithms.lora.modules import adapter_host, adapter_weights, sums, trained_and_frozen

        inner = adapter_host(run.model)
        trained, frozen = trained_and_frozen(inner)
        now = sums(frozen)
        changed = next((name for name, value in self._frozen.items() if not torch.equal(now[name], value)), None)
        if changed is not None or any(p.grad is not None for p in frozen.values()):
            raise self.no_effect(
                f"frozen weights were trained ({changed or 'they have gradients'})",
                "do not change the optimizer's groups and requires_grad after INIT",
            )
        if left_out := self._left_out(trained, run):
            raise self.no_effect(f"the optimizer does not have {left_out}", "do not change its groups after INIT")
        gradients = [p.grad for p in adapter_weights(inner) if p.grad is not None and bool(p.grad.count_nonzero())]
        if not gradients and not seen.moved:
            raise self.no_effect("no adapter got a gradient", "do not disable the adapters after INIT")
        evidence = {"adapters_with_gradient": len(gradients), "base_unchanged": True}
        if seen.moved is None:
            return evidence if seen.ended else NOT_YET  # the learning rate warms up from 0
        if seen.moved == 0:
            raise self.no_effect("no step changed an adapter", "do not change the optimizer after INIT")
        return {**evidence, "parameters_moved": seen.moved}

    def export(self, run: Run, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Save the adapters in ``adapter/`` next to ``folder``, and return the merged weights."""
        from composer_speedups.algorithms.lora.export import merged_state_dict, save_adapter
        from composer_speedups.algorithms.lora.modules import adapter_host

        inner: nn.Module = adapter_host(run.model)
        save_adapter(inner, folder.parent / "adapter", weights)
        return merged_state_dict(inner, weights)

    @staticmethod
    def _left_out(trained: dict[str, Parameter], run: Run) -> str | None:
        """A trained parameter that is in no group; None for an optimizer of copies, for example on the host."""
        held = {id(p) for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]}
        mine = {name: id(p) for name, p in trained.items()}
        if held.isdisjoint(mine.values()):
            return None
        return next((name for name, key in mine.items() if key not in held), None)
