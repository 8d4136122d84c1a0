"""The run that is to be tuned: its device, its length in steps, and what of its techniques can engage here."""

from __future__ import annotations

from collections.abc import Sequence

from composer_speedups.core.trainer_state import torch_device
from composer_speedups.data.loader import build_data
from composer_speedups.tasks.models import resolve_name
from composer_speedups.train.config.schema import Config
from composer_speedups.train.trainer import context_of, open_device
from composer_speedups.tune.candidates import Candidate, candidates_for
from composer_speedups.tune.changes import available, refusal, uses_autocast
from composer_speedups.tune.outcomes import Algorithms, Outcome, planned_steps

__all__ = ["Given"]


class Given:
    """Looks at the given run without training it; its tokens are in the cache afterwards, for all trials.

    Args:
        config: Of the given run.

    Raises:
        UserError: What train.py would say of the config, the data or a technique that cannot engage.

    Attributes:
        device: ``cpu`` or ``cuda``.
        techniques: Those of the config that can engage here.
        unengaged: Those with ``on_unavailable: warn`` that cannot, and why.
        batches_per_epoch: Training batches.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        device = open_device(config.trainer)
        self.device = torch_device(device).type
        self._context = context_of(config.trainer, device)
        self.techniques, self.unengaged = available(config, self._context)
        data = build_data(
            config.data,
            model_name=resolve_name(config.model.name),
            task=config.model.task,
            on_gpu=self.device == "cuda",
            seed=config.seed,
        )
        self.batches_per_epoch = len(data.train.dataloader)  # type: ignore[arg-type]

    @property
    def described(self) -> str:
        names = ", ".join(self.techniques) or "no techniques"
        duration = self.config.trainer.max_duration
        return f"{duration} of {self.batches_per_epoch} batches each on the {self.device} with {names}"

    def allowed(self, asked: Sequence[str] | None) -> tuple[str, ...]:
        """``tune.allow``, or its default: lower precision where the run trains in 16 bits anyway."""
        if asked is None:
            return ("lower_precision",) if uses_autocast(self.config) else ()
        return tuple(asked)

    def candidates(self) -> list[Candidate]:
        return candidates_for(self.techniques, self.device, autocast_by_config=self.config.trainer.precision != "fp32")

    def refusal(self, algorithms: Algorithms) -> str | None:
        """Why train.py would refuse these techniques before it builds a model; None when it would not."""
        return refusal(algorithms, self.config, self._context)

    def planned_steps(self, outcome: Outcome) -> int:
        """Steps of the planned run; ``outcome`` says how many tokens a step has."""
        config = self.config
        return planned_steps(
            config.trainer.max_duration, self.batches_per_epoch, config.data.batch_size, outcome.tokens_per_step
        )
