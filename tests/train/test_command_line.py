"""train.py as a process: exit codes, one line on stderr, the launcher, two ranks, and the quickstart itself."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from composer_speedups import __version__
from composer_speedups.core.command_line import find_config, parse_command_line
from composer_speedups.core.errors import ConfigError, Interrupted
from composer_speedups.train import application
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.forks import Done, Fork
from tests.helpers.hangs import HANGS
from tests.helpers.jobs import SHORT, fork_train, run
from tests.helpers.ranks import on_ranks

TRAIN = [sys.executable, str(ROOT / "train.py")]
MODULE = [sys.executable, "-m", "composer_speedups.train"]
QUICKSTART = ["-f", str(ROOT / "yamls" / "quickstart.yaml")]
YAMLS = list((ROOT / "yamls").rglob("*.yaml"))


def start(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS)


def compose(*arguments: str) -> Done:
    """Run Composer's launcher in a fork, where Composer is imported already; its ranks are new processes."""

    def job() -> None:
        from composer.cli import launcher

        sys.argv = ["composer", *arguments]
        sys.exit(launcher.main())

    return Fork(job).wait()


@pytest.mark.pins
@pytest.mark.parametrize("way", ["python train.py", "python -m composer_speedups.train", "composer train.py"])
def test_train_can_be_started_in_three_ways(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run_it(*arguments: str) -> Done:
        if way == "composer train.py":
            return compose(*TRAIN[1:], *arguments)
        done = start([*(TRAIN if way == "python train.py" else MODULE), *arguments])
        return Done(done.returncode, done.stdout + done.stderr)

    with pytest.raises(SystemExit):
        application.main(["--help"])
    helped = run_it("--help")
    assert helped.status == 0
    assert helped.stderr.startswith(capsys.readouterr().out)  # Composer's launcher appends its own output
    mistaken = run_it("-f", "quickstart", "data.bach_size=3")
    assert mistaken.status == 2
    assert "train.py: command line: unknown key 'data.bach_size'; did you mean 'data.batch_size'?" in mistaken.stderr
    assert not Path("runs").exists()


def test_a_config_of_the_package_is_found_by_name() -> None:
    assert load_config(find_config("quickstart")) == load_config(QUICKSTART[1])
    assert parse_command_line(["-f", "bert_imdb"]).file == str(ROOT / "yamls" / "bert_imdb.yaml")
    Path("quickstart").write_text("seed: 3")
    assert find_config("quickstart") == "quickstart", "an existing file takes precedence"
    assert find_config("glue/mrpc") == str(ROOT / "yamls" / "glue" / "mrpc.yaml")
    of_glue = parse_command_line(["-f", "glue/all"], several_files=True).files
    assert of_glue == [str(path) for path in sorted((ROOT / "yamls" / "glue").glob("*.yaml"))]
    shipped = ", ".join(sorted(str(p.relative_to(ROOT / "yamls"))[: -len(".yaml")] for p in YAMLS))
    with pytest.raises(ConfigError, match=f"bert_imbd: no such file.*did you mean 'bert_imdb'.* known: {shipped}$"):
        find_config("bert_imbd")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_commands_of_the_wheel_need_no_checkout() -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(Path("built").absolute())]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = Path("built").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall("site")
    [listed] = Path("site").glob("*.dist-info/entry_points.txt")
    scripts = configparser.ConfigParser()
    scripts.read(listed)
    environment = {**os.environ, "PYTHONPATH": str(Path("site").absolute())}

    def run_script(name: str, *arguments: str) -> str:
        module, _, function = scripts["console_scripts"][name].partition(":")
        code = f"import sys; from {module} import {function}; print(sys.modules[{module!r}].__file__); {function}()"
        command = [sys.executable, "-P", "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert Path(done.stdout.splitlines()[0]).is_relative_to(Path("site").absolute())
        return done.stdout

    run_script("composer-speedups-train", "-f", "quickstart", *SHORT, "trainer.max_duration=1ba")
    assert json.loads(Path("runs/quickstart/report.json").read_text())["training"]["batches"] == 1
    assert "tune.budget_seconds" in run_script("composer-speedups-tune", "--help")
    assert f"composer-speedups {__version__}" in run_script("composer-speedups", "--version")
    assert {"py.typed"} <= {path.name for path in Path("site/composer_speedups").iterdir()}
    assert "samples/s" in run_script("composer-speedups-dashboards", "bert", "dry_run=true")


def test_an_unavailable_technique_is_one_line_and_exit_status_2() -> None:
    done = fork_train("trainer.device=cpu", "algorithms.tf32_matmul={}").wait()
    assert done.status == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("train.py: tf32_matmul: TF32 needs a CUDA GPU")
    assert 'on_unavailable="warn"' in line
    assert "Traceback" not in done.stderr
    assert not Path("runs").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_quickstart_learns_in_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    shorter = ["data.length_scale=0.06", "data.max_length=24", "data.vocab_size=500"]
    fewer = ["data.train_samples=8000", "data.eval_samples=400", "baseline.batches=10"]
    report = run("trainer.progress_bar=false", "trainer.max_duration=1ep", *shorter, *fewer, short=False)
    assert report["metrics"]["accuracy"] >= 0.82
    assert all(entry["engaged"] for entry in report["algorithms"].values())
    printed = capsys.readouterr().out
    assert "samples/s" in printed
    assert "unpadding in place of sdpa_attention: " in printed


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_ranks_on_the_cpu_train_like_one() -> None:
    settings = [*SHORT, "trainer.max_duration=1ep", "trainer.device=cpu"]
    one = run(*settings, "run_name=one")
    done = compose("-n", "2", *TRAIN[1:], *QUICKSTART, *settings, "run_name=two")
    assert done.status == 0, done.stderr[-3000:]
    assert "samples/s" in done.stderr
    two = json.loads(Path("runs/two/report.json").read_text())
    assert two["training"] == {**one["training"], "ranks": 2, "microbatch_size": 4}
    assert two["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=1e-3)
    assert two["metrics"]["accuracy"] == one["metrics"]["accuracy"]
    assert two["throughput"]["samples_per_sec"] > 0
    assert two["throughput"]["padding_fraction"] == pytest.approx(one["throughput"]["padding_fraction"], abs=0.1)
    assert Path("runs/two/model/model.safetensors").exists()


@pytest.mark.parametrize("stopped", [False, True], ids=["to the end", "stopped by a signal"])
def test_ranks_on_the_cpu_leave_their_group_before_the_process_ends(stopped: bool) -> None:
    """A thread of gloo that releases a tensor while the interpreter ends would abort the process."""

    def rank() -> bool:
        def main(_: list[str]) -> None:
            torch.distributed.all_reduce(torch.ones(2))
            if stopped:
                raise Interrupted(signal.SIGTERM, batch=3)

        application.main = main  # in this process, a fork
        with contextlib.suppress(Interrupted):
            application.command()
        return torch.distributed.is_initialized()

    assert on_ranks(rank) == [False, False]
