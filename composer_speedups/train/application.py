"""The training program: config → data → model → techniques → Trainer → report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer_speedups.core.errors import Interrupted, RunFailedError, first_line
from composer_speedups.core.files import check_folder, write_atomically
from composer_speedups.core.settings import refuse
from composer_speedups.train.cli import exit_codes, read_command_line
from composer_speedups.train.config.schema import Config
from composer_speedups.train.startup import StartupClock, open_gpu_early, prefetch_cpu_model, without_gc

if TYPE_CHECKING:
    from composer.core import Callback


def main(arguments: list[str]) -> None:
    clock = StartupClock()
    config = read_command_line(arguments)  # report unknown keys before torch is imported
    # Missing files and columns too, because the imports take most of the time until the first step.
    if config.data.train_file is not None:
        from composer_speedups.data.reader import check_data_files  # imports pyarrow

        check_data_files(config.data, config.task)
    if config.model.size is None:  # otherwise the name is not read
        check_folder(config.model.name, "model.name")
    check_folder(config.data.tokenizer or "", "data.tokenizer")
    clock.lap("config")
    train(config, clock)


def train(config: Config, clock: StartupClock, callbacks: Sequence[Callback] = ()) -> None:
    with without_gc():
        open_gpu_early(config)

        from composer.utils import dist, reproducibility

        from composer_speedups.callbacks.checkpoints import callback_of
        from composer_speedups.callbacks.evaluations import BestWeights
        from composer_speedups.core.engaging import check
        from composer_speedups.core.registry import build_techniques
        from composer_speedups.core.reversible import MATMUL_PRECISION
        from composer_speedups.core.trainer_state import torch_device
        from composer_speedups.tasks.export import export_model
        from composer_speedups.tasks.models import build_model
        from composer_speedups.tasks.task import build_task
        from composer_speedups.train.baseline import baseline_techniques, measure_baseline
        from composer_speedups.train.console import describe_run
        from composer_speedups.train.environment import device_name
        from composer_speedups.train.fit import StopSignals, is_trained, train_to_end
        from composer_speedups.train.model_card import model_card
        from composer_speedups.train.plot import write_plot
        from composer_speedups.train.report import StartupTimes, write_report
        from composer_speedups.train.run_folder import RunFolder
        from composer_speedups.train.trainer import build_trainer, data_of, join_ranks, open_device, run_of

        techniques = build_techniques(config.algorithms, config.on_unavailable)
        task = build_task(config.task)
    clock.lap("imports")
    cpu = prefetch_cpu_model()
    device = open_device(config.trainer)
    for asked in (techniques, baseline_techniques(config)):
        check(asked, run_of(config.trainer, device))  # before any GPU memory is allocated
    join_ranks(config.trainer, device)
    clock.lap("device")

    with StopSignals() as stop, RunFolder(config) as folder, MATMUL_PRECISION.held_at("highest"):
        on_gpu = torch_device(device).type == "cuda"
        indexed = any(getattr(technique, "cache", False) for technique in techniques)  # layer_freezing's
        data = data_of(config, task, on_gpu=on_gpu, indexed=indexed)
        loader: Any = data.train.dataloader
        refuse(config.warmup_checks(None if config.data.streams else len(loader)))
        clock.lap("data")
        cpu.join()
        if (baseline := measure_baseline(config, device)) is not None:
            clock.lap("baseline")
        reproducibility.seed_all(config.seed)
        model = build_model(config.model, task, data.tokenizer, config.data.max_length)
        clock.lap("model")
        watching = [StartupTimes(clock), *callbacks]
        summary = describe_run(config, model, data, techniques, f"{folder.path}/", device_name(torch_device(device)))
        trainer = build_trainer(config, model, data, techniques, device, folder, callbacks=watching, stop=stop)
        if dist.get_global_rank() == 0:
            print(summary, flush=True)
        clock.lap("trainer")
        try:
            train_to_end(trainer, stop)
        except Exception:
            if config.export and is_trained(trainer.state):  # a logger failed at the end, which costs no model
                export_model(trainer.state, folder / "model")
            raise
        if best := callback_of(trainer.state, BestWeights):
            best.restore(trainer.state)
        exported = export_model(trainer.state, folder / "model") if config.export else None
        try:
            report = write_report(trainer, config, folder, baseline, data.summary)
            if exported is not None and dist.get_global_rank() == 0:
                write_atomically(exported / "README.md", str(model_card(report)))
            write_plot(trainer, config, folder, report["classes"])
        except Exception as error:
            ended = f"the run was trained to its end{f', and the model is in {exported}' if exported else ''}"
            reason = f"its report, model card or plot failed ({type(error).__name__}: {first_line(error)})"
            raise RunFailedError(f"{ended}; {reason}") from error
        finally:
            trainer.close()


def command() -> None:
    with exit_codes():
        try:
            main(sys.argv[1:])
        except Interrupted:
            _leave_ranks()
            raise
        _leave_ranks()


def _leave_ranks() -> None:
    """Leave the group of gloo: a thread of it that still holds a tensor at the end aborts the process."""
    from torch import distributed  # imported by the run

    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()
