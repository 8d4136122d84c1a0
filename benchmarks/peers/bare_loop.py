"""python -m benchmarks.peers.bare_loop -f FILE [key=value ...]: the config's job in a plain PyTorch loop.

It accepts train.py's config, including techniques: each is applied by its function (``apply_unpadding``,
``apply_torch_compile`` …) in the usual order. It does not use Composer, the techniques' classes or their evidence, so
comparing it with train.py shows the overhead of the suite.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import composer_speedups
from benchmarks.peers.job import Job, Plan, build_job, plan_of, read_arguments
from benchmarks.peers.meter import Meter
from composer_speedups import plan_unpadding
from composer_speedups.algorithms.optimizers.technique import OptimizerTechnique
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.operator_recorder import compile_counts
from composer_speedups.core.registry import build_techniques
from composer_speedups.core.technique import Technique, screen, techniques_of
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import Config
from composer_speedups.train.optimization import build_optimizer
from composer_speedups.train.run_folder import RunFolder
from composer_speedups.train.trainer import context_of, open_device

_LEFT_OUT = {"on_unavailable", "allow_cpu"}  # settings of a class that its function does not need

_COMPOSERS = {"early_loss"}  # depends on Composer's loop
_BETWEEN_BATCHES = {"empty_cache"}  # its function has no effect when applied once


def main(arguments: list[str]) -> None:
    config, flags = read_arguments(arguments)
    if flags:
        raise ConfigError(f"unknown key 'peer.{next(iter(flags))}'; the bare loop has no keys of its own")
    techniques = techniques_of(build_techniques(config.algorithms, config.on_unavailable))
    device = open_device(config.trainer)
    screen(techniques, context_of(config.trainer, device))
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=torch_device(device).type == "cuda")
        plan = plan_of(config, len(job.train))
        model = job.model.to(torch_device(device))
        before = compile_counts()
        optimizer, scaler = apply_all(techniques, config, model, build_optimizer(model, config.optimizer))
        meter = Meter(config, model, device, _precision(config))
        Loop(config, job, optimizer, scaler, meter).fit(plan)
        evidence = {
            "techniques": [repr(technique) for technique in techniques if technique.name not in _COMPOSERS],
            "graphs": compile_counts().since(before).graphs,
        }
        meter.write(folder, "bare_loop", evidence)


def _precision(config: Config) -> str:
    mixed = config.algorithms.get("mixed_precision")
    if mixed is not None or "mixed_precision" in config.algorithms:
        return f"amp_{(mixed or {}).get('dtype', 'bf16')}"
    return config.trainer.precision


def apply_all(
    techniques: list[Technique], config: Config, model: FinetuneModel, optimizer: Optimizer
) -> tuple[Optimizer, torch.amp.GradScaler]:
    """Apply each technique by its function, or build its optimizer; return the optimizer and the scaler.

    Raises:
        ConfigError: A technique whose function lacks a setting of its class, or that acts between batches.
    """
    scaler = torch.amp.GradScaler(enabled=False)
    if config.trainer.precision != "fp32":
        dtype: Any = config.trainer.precision.removeprefix("amp_")
        scaler = composer_speedups.apply_mixed_precision(model, dtype)
    for technique in (t for t in techniques if t.name not in _COMPOSERS):
        result = _apply(technique, config.algorithms[technique.name] or {}, model, optimizer)
        if isinstance(result, Optimizer):
            optimizer = result
        elif isinstance(result, torch.amp.GradScaler):
            scaler = result
    return optimizer, scaler


def _apply(technique: Technique, settings: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> Any:
    if isinstance(technique, OptimizerTechnique):
        return technique.kind.build(optimizer, model)
    function: Callable[..., Any] = getattr(composer_speedups, f"apply_{technique.name}")
    parameters = inspect.signature(function).parameters
    settings = {name: value for name, value in settings.items() if name not in _LEFT_OUT}
    unknown = [f".{name}" for name in settings if name not in parameters]
    if unknown or technique.name in _BETWEEN_BATCHES:
        key = f"algorithms.{technique.name}{unknown[0] if unknown else ''}"
        raise ConfigError(f"{key}: the bare loop does not support it; remove it")
    given = {"model": model, "optimizer": optimizer, "optimizers": optimizer}
    return function(**{name: value for name, value in given.items() if name in parameters}, **settings)


class Loop:
    """Trains and evaluates a job, and tells the meter."""

    def __init__(
        self, config: Config, job: Job, optimizer: Optimizer, scaler: torch.amp.GradScaler, meter: Meter
    ) -> None:
        self.job, self.model, self.optimizer, self.scaler, self.meter = job, job.model, optimizer, scaler, meter
        self.device = next(job.model.parameters()).device
        self._max_grad_norm = config.optimizer.max_grad_norm
        self._trained = [p for p in job.model.parameters() if p.requires_grad]
        self._unpadded = "unpadding" in config.algorithms

    def fit(self, plan: Plan) -> None:
        train, evaluation = self.job.train, self.job.eval
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, plan.rate)
        done = 0
        self.meter.begin(self.optimizer, plan.batches)
        self.model.train()
        for epoch in range(plan.epochs):
            self.meter.between_epochs()
            train.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            batches = iter(train)
            for _ in range(min(len(train), plan.batches - done)):
                self.meter.waiting()
                batch = next(batches)
                self.meter.loaded(batch)
                loss = self._step(batch)
                scheduler.step()
                done += 1
                self.meter.end_batch(loss)
                if evaluation is not None and done in plan.evaluate_after:
                    with self.meter.evaluating():
                        self.evaluate(evaluation)
        self.meter.end()

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
        """Return the model's ``loss`` and ``logits``, and the labels on its device."""
        if self._unpadded:
            plan_unpadding(self.model, batch["attention_mask"])
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        return self.model(batch), batch["labels"]

    def _step(self, batch: Mapping[str, Tensor]) -> Tensor:
        outputs, _ = self.forward(batch)
        self.scaler.scale(outputs["loss"]).backward()
        if self._max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return outputs["loss"].detach()

    def evaluate(self, loader: DataLoader[Any]) -> None:
        """Accuracy over labels that are not ignored, and their mean loss."""
        sums = torch.zeros(3, device=self.device)
        self.model.eval()
        with torch.no_grad():
            for batch in loader:
                outputs, labels = self.forward(batch)
                counts = labels != -100
                right = (outputs["logits"].argmax(-1) == labels) & counts
                sums += torch.stack([right.sum(), outputs["loss"] * counts.sum(), counts.sum()])
        self.model.train()
        right, loss, count = sums.tolist()
        self.meter.evaluated({"accuracy": right / count, "loss": loss / count})


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
