"""The training program: config → data → model → techniques → Trainer → report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer_speedups.core.errors import Interrupted
from composer_speedups.core.files import check_folder
from composer_speedups.core.settings import Origins, refuse
from composer_speedups.train.cli import exit_codes, read_command_line
from composer_speedups.train.config.schema import Config
from composer_speedups.train.startup import (
    StartupClock,
    early_processes,
    open_gpu_early,
    prefetch_cpu_model,
    wait_for,
    without_gc,
)

if TYPE_CHECKING:
    from composer.core import Callback


def main(arguments: list[str]) -> None:
    """Run the training program.

    Raises:
        Refusal: An unknown key, an invalid value, or a technique that cannot engage.
        RunFailedError: The report or the plot failed. The model was exported before.
    """
    clock = StartupClock()
    config, origins = read_command_line(arguments)  # report unknown keys before torch is imported
    check_paths(config)
    clock.lap("config")
    with early_processes(config) as early:
        train(config, origins, clock, early)


def check_paths(config: Config) -> None:
    """Refuse missing files, columns and folders before the imports, which take most of the time until the first step.

    Raises:
        Refusal: Names the key, the path and the fix.
    """
    if config.data.train_file is not None:
        from composer_speedups.data.reader import check_data_files  # imports pyarrow

        check_data_files(config.data, config.task)
    if config.model.size is None:  # otherwise the name is not read
        check_folder(config.model.name, "model.name")
    check_folder(config.data.tokenizer or "", "data.tokenizer")


def train(
    config: Config,
    origins: Origins,
    clock: StartupClock,
    early: Sequence[subprocess.Popen[bytes]] = (),
    callbacks: Sequence[Callback] = (),
) -> None:
    with without_gc():
        open_gpu_early(config)

        from composer.utils import dist, reproducibility

        from composer_speedups.callbacks.evaluations import BestWeights
        from composer_speedups.core.engaging import check
        from composer_speedups.core.registry import build_techniques
        from composer_speedups.core.trainer_state import torch_device
        from composer_speedups.data.loader import build_data
        from composer_speedups.tasks.export import export_model
        from composer_speedups.tasks.models import build_model, resolve_name
        from composer_speedups.tasks.task import build_task
        from composer_speedups.train.baseline import baseline_techniques, measure_baseline
        from composer_speedups.train.console import describe_run
        from composer_speedups.train.environment import device_name
        from composer_speedups.train.fit import StopSignals, is_trained, train_to_end
        from composer_speedups.train.model_card import write_model_card
        from composer_speedups.train.plot import write_plot
        from composer_speedups.train.recording import Recording
        from composer_speedups.train.report import StartupTimes, callback_of, write_report
        from composer_speedups.train.run_folder import RunFolder
        from composer_speedups.train.trainer import build_trainer, join_ranks, open_device, run_of

        techniques = build_techniques(config.algorithms, config.on_unavailable)
        task = build_task(config.task)
    clock.lap("imports")
    cpu = prefetch_cpu_model()
    device = open_device(config.trainer)
    for asked in (techniques, baseline_techniques(config)):
        check(asked, run_of(config.trainer, device))  # before any GPU memory is allocated
    join_ranks(config.trainer, device)
    clock.lap("device")

    with StopSignals() as stop, RunFolder(config, named="run_name" in origins) as folder:
        model_name = resolve_name(config.model.name)
        on_gpu = torch_device(device).type == "cuda"
        data = build_data(config.data, task, model_name=model_name, on_gpu=on_gpu, seed=config.seed)
        loader: Any = data.train.dataloader
        refuse(config.warmup_checks(None if config.data.streams else len(loader)))
        clock.lap("data")
        cpu.join()
        if (baseline := measure_baseline(config, device)) is not None:
            clock.lap("baseline")
        reproducibility.seed_all(config.seed)
        model = build_model(config.model, task, data.tokenizer, config.data.max_length)
        clock.lap("model")
        wait_for(early)
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
        recording, report = Recording(), None
        with recording.of("report"):
            report = write_report(trainer, config, folder, baseline, data.summary)
        with recording.of("model card"):
            if report is not None and exported is not None and dist.get_global_rank() == 0:
                write_model_card(report, exported)
        with recording.of("plot"):
            write_plot(trainer, config, folder, {} if report is None else report["classes"])
        trainer.close()
        recording.check(exported)


def command() -> None:
    """Entry point of ``composer train.py``, ``python -m composer_speedups.train`` and ``composer-speedups-train``."""
    with exit_codes():
        try:
            main(sys.argv[1:])
        except Interrupted:
            _leave_ranks()
            raise
        _leave_ranks()


def _leave_ranks() -> None:
    """Leave the process group of ranks on a CPU.

    Otherwise a thread of gloo that still holds a tensor when the interpreter ends aborts the process ("terminate called
    without an active exception"), and the launcher reports a failed run.
    """
    from torch import distributed  # imported by the run

    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()
