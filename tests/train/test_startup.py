"""Start-up from process start to the first step: timing, garbage collection, bytecode cache, early GPU start."""

from __future__ import annotations

import gc
import json
import os
import shutil
import stat
import subprocess
import sys
from importlib._bootstrap_external import _code_to_timestamp_pyc  # type: ignore[attr-defined]
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.loggers import InMemoryLogger
from composer.utils.collect_env import get_cpu_model

from composer_speedups.algorithms.torch_compile import before_imports as torch_compile_hook
from composer_speedups.core.before_imports import EarlyWork
from composer_speedups.core.errors import ConfigError
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import Config
from composer_speedups.train.report import StartupTimes, summary_table
from composer_speedups.train.startup import (
    StartupClock,
    kept_bytecode,
    look_at_cpu,
    open_early,
    planned_run,
    without_gc,
)
from tests.conftest import ROOT
from tests.helpers.common import make_trainer
from tests.helpers.jobs import run


@pytest.mark.pins
def test_the_startup_phases_add_up() -> None:
    times = iter([103.0, 104.0, 110.0, 111.5])
    clock = StartupClock(lambda: next(times), started=100.0)
    for phase in ("config", "imports", "imports"):
        clock.lap(phase)
    assert clock.summary() == {
        "interpreter_seconds": 3.0,
        "config_seconds": 1.0,
        "imports_seconds": 7.5,
        "to_first_step_seconds": 11.5,
    }


@pytest.mark.pins
def test_the_clock_stops_at_the_first_batch() -> None:
    times = iter([1.0, 5.0, 9.0])
    callback = StartupTimes(StartupClock(lambda: next(times), started=0.0))
    assert callback.summary() == {}
    memory = InMemoryLogger()
    trainer = make_trainer(callbacks=[callback], loggers=[memory])
    trainer.fit()
    trainer.close()
    assert callback.summary() == {"interpreter_seconds": 1.0, "first_step_seconds": 4.0, "to_first_step_seconds": 5.0}
    [(_, logged)] = memory.data["startup/to_first_step_seconds"]
    assert logged == 5.0


def test_the_report_contains_the_startup_phases() -> None:
    report = run("trainer.max_duration=2ba", "trainer.eval_batches=1")
    startup = report["startup"]
    phases = ("interpreter", "config", "imports", "device", "data", "model", "trainer", "first_step")
    assert set(startup) == {f"{phase}_seconds" for phase in phases} | {"to_first_step_seconds"}
    assert sum(startup[f"{phase}_seconds"] for phase in phases) == pytest.approx(startup["to_first_step_seconds"])
    assert 0 < startup["to_first_step_seconds"] < report["wall_seconds"]
    assert startup["first_step_seconds"] > 0
    assert "s to the end of the first step: " in summary_table(report, "runs/quickstart")


def test_garbage_collection_is_disabled_only_within_the_context() -> None:
    assert gc.isenabled()
    with without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled(), "it was disabled before"
    finally:
        gc.enable()


def test_objects_made_by_imports_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    with without_gc():
        pass
    assert gc.get_freeze_count() == before, "torch was already imported"
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with without_gc():
            sys.modules["torch"] = torch
            made: list[list[int]] = [[] for _ in range(100_000)]
        assert gc.get_freeze_count() > before + len(made)
    finally:
        gc.unfreeze()


HOME = Path("home")  # XDG_CACHE_HOME
_IMPORTING = """
import json, os, sys
sys.path.insert(0, {root!r})
from composer_speedups.train.config.schema import Config
from composer_speedups.train.startup import kept_bytecode
config = Config(bytecode={wanted})
config.data.cache_dir = "cache"
before = sys.dont_write_bytecode, sys.pycache_prefix, dict(os.environ)
with kept_bytecode(config) as kept:
    import torch
    inside = [os.environ.get(name) for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")]
assert before == (sys.dont_write_bytecode, sys.pycache_prefix, dict(os.environ)), "not restored"
print(json.dumps([kept, inside]))
"""


def importing(*, wanted: bool = True, **variables: str) -> tuple[bool, list[str | None]]:
    """Import a fake package named torch in a new process; return whether bytecode is kept, and two variables inside."""
    package = Path("packages/torch")
    package.mkdir(parents=True, exist_ok=True)
    if not (source := package / "__init__.py").exists():  # a new modification time would invalidate the bytecode
        source.write_text("x = 1\n")
    cleared = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    environment = {**cleared, "PYTHONPATH": str(package.parent.absolute()), "XDG_CACHE_HOME": str(HOME.absolute())}
    environment |= variables
    code = _IMPORTING.format(root=str(ROOT), wanted=wanted)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode and "ConfigError" in done.stderr:
        raise ConfigError(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    kept, inside = json.loads(done.stdout)
    return kept, inside


def test_bytecode_is_kept_if_the_environment_disables_it() -> None:
    kept, inside = importing(PYTHONDONTWRITEBYTECODE="1")
    folder = (HOME / "composer_speedups/bytecode").absolute()
    assert kept
    assert inside == [None, str(folder)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made = [*folder.rglob("*.pyc")]
    assert [p.name.split(".")[0] for p in made if "packages" in p.parts] == ["__init__"]
    before = [p.stat().st_mtime_ns for p in made]
    assert importing(PYTHONDONTWRITEBYTECODE="1")[0]
    assert [p.stat().st_mtime_ns for p in folder.rglob("*.pyc")] == before, "the bytecode was found, not rewritten"
    assert not [*Path("packages").rglob("*.pyc")]


def test_bytecode_is_not_kept_if_python_or_the_user_already_does() -> None:
    assert importing(wanted=False, PYTHONDONTWRITEBYTECODE="1") == (False, ["1", None])
    assert importing(PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX="mine") == (False, ["1", "mine"])
    assert importing() == (False, [None, None])
    assert [*Path("packages").rglob("*.pyc")], "Python wrote it to __pycache__"
    assert importing(PYTHONDONTWRITEBYTECODE="1")[0] is False, "there is bytecode already"
    assert not HOME.exists()
    with kept_bytecode(Config()) as kept:  # torch is imported already
        assert not kept


def test_the_cpu_model_is_cached_early() -> None:
    get_cpu_model.cache_clear()
    look_at_cpu().join(60)
    assert get_cpu_model.cache_info().currsize == 1


def test_no_thread_starts_early_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr("threading.Thread", forbidden)
    config = Config()
    config.trainer.device = "cpu"
    open_early(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    open_early(Config())


def test_a_gpu_that_cannot_be_opened_early_is_left_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fails(index: int) -> None:
        asked.append(index)
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.setattr("threading.Thread", _AtOnce)
    monkeypatch.setenv("LOCAL_RANK", "3")
    open_early(Config())
    assert asked == [3]


def test_techniques_start_their_work_while_the_gpu_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_compile starts inductor's processes if inductor is going to compile."""
    started: list[str] = []
    monkeypatch.setattr(torch_compile_hook, "importlib", SimpleNamespace(import_module=started.append))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr("threading.Thread", _AtOnce)
    config = Config()
    config.trainer.device = "cpu"
    config.algorithms = {"torch_compile": {}, "cuda_graphs": None}
    open_early(config, EarlyWork(planned_run(config)))
    assert started == [], "there is no GPU to train on"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config.trainer.device = "auto"
    for settings in ({}, None, {"backend": "inductor"}, {"backend": "aot_eager"}):
        config.algorithms["torch_compile"] = settings
        open_early(config, EarlyWork(planned_run(config)))
    assert started == ["torch._inductor.async_compile"] * 3


def test_hooks_import_no_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from composer_speedups.core.before_imports import EarlyWork, PlannedRun;"
        "from composer_speedups.core.catalogue import technique_names;"
        "work = EarlyWork(PlannedRun(dict.fromkeys(technique_names()), {}, 'fp32', 'cpu'));"
        "work.before_torch(); print(len(work._hooks)); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len([*(ROOT / "composer_speedups/algorithms").glob("*/before_imports.py")])


class _AtOnce:
    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        self.target, self.args = target, args

    def start(self) -> None:
        self.target(*self.args)


def test_objects_are_frozen_when_the_program_ends() -> None:
    frozen = gc.get_freeze_count()
    try:
        with exit_codes():
            pass
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_a_second_run_tokenizes_nothing() -> None:
    """A tokenizer keeps the truncation of its last call, which must not change the cache's key."""
    made = []
    for _ in range(2):
        run("trainer.max_duration=1ba", "trainer.eval_batches=1")
        made.append(sorted(Path(".cache/composer_speedups/tokens").iterdir()))
    assert made[0] == made[1]
    assert len(made[0]) == 2


@pytest.mark.gpu
def test_a_gpu_is_opened_early() -> None:
    code = (
        "import sys, threading; sys.path.insert(0, sys.argv[1]);"
        "from composer_speedups.train.config.schema import Config;"
        "from composer_speedups.train.startup import open_early; import torch; assert not torch.cuda.is_initialized();"
        "open_early(Config()); [t.join(60) for t in threading.enumerate() if t.daemon];"
        "assert torch.cuda.is_initialized() and torch.cuda.memory_allocated() == 0"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True)


def plant(prefix: Path) -> None:
    """Write bytecode that Python accepts for the fake torch package and that creates a file named ``ran``."""
    source = Path("packages/torch/__init__.py").absolute()
    found, payload = source.stat(), compile("open('ran', 'w').close()", str(source), "exec")
    target = prefix / source.parent.relative_to("/") / f"__init__.{sys.implementation.cache_tag}.pyc"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(_code_to_timestamp_pyc(payload, int(found.st_mtime), found.st_size))


def test_bytecode_planted_in_a_shared_cache_dir_does_not_run() -> None:
    importing()
    shutil.rmtree("packages/torch/__pycache__")
    for folder in ("cache", "cache/bytecode"):
        plant(Path(folder).absolute())
        Path(folder).chmod(0o777)
    importing(PYTHONPYCACHEPREFIX=str(Path("cache/bytecode").absolute()))
    Path("ran").unlink()  # it runs if the user chose the folder
    assert importing(PYTHONDONTWRITEBYTECODE="1")[0]
    assert not Path("ran").exists()


def test_a_bytecode_folder_writable_by_others_is_refused() -> None:
    importing()
    shutil.rmtree("packages/torch/__pycache__")
    folder = HOME / "composer_speedups/bytecode"
    plant(folder.absolute())
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"bytecode: others could put code into .*mode 777.*or bytecode=false"):
        importing(PYTHONDONTWRITEBYTECODE="1")
    assert not Path("ran").exists()
    folder.chmod(0o755)
    assert importing(PYTHONDONTWRITEBYTECODE="1")[0]
    assert Path("ran").exists(), "others can no longer write to it"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_no_bytecode_is_kept_if_its_folder_cannot_be_created() -> None:
    Path("file").touch()
    home = str(Path("file").absolute())
    assert importing(PYTHONDONTWRITEBYTECODE="1", XDG_CACHE_HOME=home) == (False, ["1", None])
