"""python -m benchmarks.peers.bare_loop -f FILE [key=value ...]: the config's job in a plain PyTorch loop.

It accepts train.py's config, including techniques, which :func:`composer_speedups.apply` applies. It does not use
Composer, so comparing it with train.py shows the overhead of the suite.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.peers.job import Job, Plan, build_job, plan_of, read_arguments
from benchmarks.peers.meter import Meter
from composer_speedups import apply
from composer_speedups.core.compile_counts import compile_counts
from composer_speedups.core.registry import build_techniques
from composer_speedups.core.trainer_state import torch_device
from composer_speedups.packing.encoder import with_counted_rows
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import RunFolder
from composer_speedups.train.trainer import build_optimizer, open_device

_COMPOSERS = {"early_loss", "lean_dispatch"}  # depend on Composer's loop


def main(arguments: list[str]) -> None:
    config, _ = read_arguments(arguments)
    wanted = {name: settings for name, settings in config.algorithms.items() if name not in _COMPOSERS}
    techniques = build_techniques(wanted, config.on_unavailable)
    precision = _precision(config)
    if precision != "fp32" and "mixed_precision" not in wanted:
        techniques += build_techniques({"mixed_precision": {"dtype": precision.removeprefix("amp_")}})
    device = open_device(config.trainer)
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=torch_device(device).type == "cuda")
        plan = plan_of(config, len(job.train))
        model = job.model.to(torch_device(device))
        before = compile_counts()
        applied = apply(model, techniques, build_optimizer(model, config.optimizer))
        meter = Meter(config, model, device, precision)
        Loop(config, job, applied.optimizer, meter).fit(plan)
        evidence = {"techniques": list(map(repr, techniques)), "graphs": compile_counts().since(before).graphs}
        meter.write(folder, "bare_loop", evidence)


def _precision(config: Config) -> str:
    mixed = config.algorithms.get("mixed_precision")
    if mixed is not None or "mixed_precision" in config.algorithms:
        return f"amp_{(mixed or {}).get('dtype', 'bf16')}"
    return config.trainer.precision


class Loop:
    """Trains and evaluates a job, and tells the meter."""

    def __init__(self, config: Config, job: Job, optimizer: Optimizer, meter: Meter) -> None:
        self.job, self.model, self.optimizer, self.meter = job, job.model, optimizer, meter
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
        moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        with with_counted_rows(self.model, batch, moved):
            return self.model(moved), moved["labels"]

    def _step(self, batch: Mapping[str, Tensor]) -> Tensor:
        outputs, _ = self.forward(batch)
        outputs["loss"].backward()
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm)
        self.optimizer.step()
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
