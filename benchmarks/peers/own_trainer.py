"""python -m benchmarks.peers.own_trainer -f FILE [key=value ...]: a plain Composer Trainer with this package, on some
GPUs.

The job is that of the config. Instead of its ``algorithms`` and ``trainer`` keys, the Trainer uses ``recommended()``
and the callbacks of ``composer_speedups.distributed``, as in ``examples/own_trainer.py``, and nothing else of the
suite.

- ``peer.recommended``: false for a Trainer without any technique, in float32.
- ``peer.lean_dispatch``: false for the recommended set without it.
- ``peer.distributed``: false for Composer's own DDP and garbage collection.
- ``peer.float8``: true for ``recommended(precision="fp8")``.
- ``peer.plain_loader``: true for a plain ``torch.utils.data.DataLoader`` over padded samples, with ``data.workers``
  workers and pinned memory, on one GPU, in place of ``train.py``'s loader.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, cast

import torch
from composer import Trainer
from composer.core import Callback, DataSpec
from composer.devices import DeviceCPU, DeviceGPU
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers.job import build_job, read_arguments
from benchmarks.peers.meter import monitors
from composer_speedups import OverlappedDDP, recommended, share_cores
from composer_speedups.callbacks.run_report import RunReport
from composer_speedups.core.settings import Settings
from composer_speedups.data.loader import real_tokens
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.report import write_report
from composer_speedups.train.run_folder import RunFolder
from composer_speedups.train.trainer import build_optimizer, build_scheduler


class Flags(Settings):
    recommended: bool = True
    lean_dispatch: bool = True
    distributed: bool = True
    float8: bool = False
    plain_loader: bool = False


def main(arguments: list[str]) -> None:
    config, flags = read_arguments(arguments, Flags, several_ranks=True)
    on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    device = DeviceGPU(allow_tf32=False) if on_gpu else DeviceCPU()
    distributed: list[Callback] = [OverlappedDDP()] if flags.distributed else []
    if distributed:
        share_cores(computes=not on_gpu)
    if dist.get_world_size() > 1:
        dist.initialize_dist(device, config.trainer.dist_timeout)
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=on_gpu)
        loader = plain_loader(job.train, config.data.workers, on_gpu=on_gpu) if flags.plain_loader else job.train
        if distributed:
            gc.freeze()  # a full collection takes 0.4 s in some step, while all other ranks wait
        algorithms = []
        if flags.recommended:
            algorithms = recommended(config.on_unavailable, "fp8" if flags.float8 else "bf16")
            algorithms = [t for t in algorithms if flags.lean_dispatch or t.name != "lean_dispatch"]
        trainer = Trainer(
            model=job.model,
            train_dataloader=DataSpec(loader, get_num_tokens_in_batch=real_tokens),
            max_duration=config.trainer.max_duration,
            optimizers=build_optimizer(job.model, config.optimizer),
            schedulers=build_scheduler(config.scheduler),
            algorithms=algorithms,
            callbacks=[*distributed, *monitors(config), RunReport()],
            run_name=config.run_name,
            progress_bar=False,
            device=device,
            precision="fp32",  # mixed_precision, one of the recommended techniques, sets bf16
            seed=config.seed,
        )
        trainer.fit()
        write_report(trainer, config, folder)
        trainer.close()


def plain_loader(prepared: DataLoader[Any], workers: int, *, on_gpu: bool) -> DataLoader[Any]:
    """Return a DataLoader with torch's own collation over the padded samples of another one."""
    samples = [dict(zip(batch, row, strict=True)) for batch in prepared for row in zip(*batch.values(), strict=True)]
    assert prepared.batch_size is not None
    return DataLoader(
        cast("Dataset[Any]", samples), batch_size=prepared.batch_size, shuffle=True, drop_last=True,
        num_workers=workers, persistent_workers=workers > 0, pin_memory=on_gpu,
    )  # fmt: skip


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
