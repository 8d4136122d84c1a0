"""python -m benchmarks.peers.own_trainer -f FILE [key=value ...]: a plain Composer Trainer with this package, on some
GPUs.

The job is that of the config. Instead of its ``algorithms`` and ``trainer`` keys, the Trainer uses ``recommended()``
and the callbacks of ``composer_speedups.distributed``, as in ``examples/own_trainer.py``, and nothing else of the
suite.

- ``peer.distributed``: false for Composer's own DDP and garbage collection; default true.
"""

from __future__ import annotations

import sys

import torch
from composer import Trainer
from composer.core import Callback, DataSpec
from composer.devices import DeviceCPU, DeviceGPU
from composer.utils import dist

from benchmarks.peers.job import build_job, read_arguments
from benchmarks.peers.meter import monitors
from composer_speedups import recommended
from composer_speedups.callbacks.engagement import EngagementReport
from composer_speedups.core.errors import ConfigError
from composer_speedups.data.loader import real_tokens
from composer_speedups.distributed import FreezeGarbage, OverlappedDDP, share_cores
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.optimization import build_optimizer, build_scheduler
from composer_speedups.train.report import write_report
from composer_speedups.train.run_folder import RunFolder


def main(arguments: list[str]) -> None:
    config, flags = read_arguments(arguments, several_ranks=True)
    if set(flags) - {"distributed"} or not isinstance(flags.get("distributed", True), bool):
        raise ConfigError(f"peer.{next(iter(flags))}: this peer only supports peer.distributed=true or false")
    on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    device = DeviceGPU(allow_tf32=False) if on_gpu else DeviceCPU()
    distributed: list[Callback] = [OverlappedDDP(), FreezeGarbage()] if flags.get("distributed", True) else []
    if distributed:
        share_cores(computes=not on_gpu)
    if dist.get_world_size() > 1:
        dist.initialize_dist(device, config.trainer.dist_timeout)
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=on_gpu)
        trainer = Trainer(
            model=job.model,
            train_dataloader=DataSpec(job.train, get_num_tokens_in_batch=real_tokens),
            max_duration=config.trainer.max_duration,
            optimizers=build_optimizer(job.model, config.optimizer),
            schedulers=build_scheduler(config.scheduler),
            algorithms=recommended(config.on_unavailable),
            callbacks=[*distributed, EngagementReport(), *monitors(config)],
            run_name=config.run_name,
            progress_bar=False,
            device=device,
            precision="fp32",  # mixed_precision, one of the recommended techniques, sets bf16
            seed=config.seed,
        )
        trainer.fit()
        write_report(trainer, config, folder)
        trainer.close()


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
