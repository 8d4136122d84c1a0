"""Malformed checkpoints are refused with one line that names the entry and the fix, and nothing is changed."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from composer import Trainer
from composer.core import Callback, State

from composer_speedups.callbacks.saved_callback import SavedCallback
from composer_speedups.core.errors import ConfigError
from composer_speedups.train import fit
from composer_speedups.train.checkpoints.reading import MalformedError, keep_loadable, validate
from tests.helpers.jobs import fork_train, run, short_checkpoint

Change = Callable[[dict[str, Any]], Any]
BRIEF = ("trainer.max_duration=4ba", "trainer.eval_batches=1", "export=false")
EMBEDDINGS = "model.bert.embeddings.word_embeddings.weight"
WEIGHT = f"state/model/{EMBEDDINGS}"


@pytest.fixture(scope="module")
def valid_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_checkpoint(tmp_path_factory.mktemp("valid_checkpoint"))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[State]:
    """Return the state of the run that the checkpoint belongs to, before training; tests must not change it."""
    trainers: list[Trainer] = []

    def stop(trainer: Trainer, _: Any) -> NoReturn:
        trainers.append(trainer)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("state"))
        patch.setattr(fit, "train_to_end", stop)
        with pytest.raises(SystemExit):
            run(*BRIEF)
    yield trainers[0].state
    trainers[0].close()


def changed(valid_checkpoint: Path, change: Change, name: str = "changed.pt") -> str:
    checkpoint = torch.load(valid_checkpoint, weights_only=False)
    change(checkpoint)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, name)
    return f"checkpoint.load={name}"


def set_entry(checkpoint: dict[str, Any], path: str, value: Any) -> None:
    """Set the entry at a path of keys to ``value``; ``...`` deletes it."""
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in parents:
        checkpoint = checkpoint[key]
    if value is ...:
        del checkpoint[last]
    else:
        checkpoint[last] = value


def put(path: str, value: Any) -> Change:
    return lambda checkpoint: set_entry(checkpoint, path, value)


TIME = "state/timestamp/Timestamp"
ADAMW = "state/optimizers/AdamW"
SCHEDULE = "state/schedulers/LambdaLR"
CALLBACKS = "state/callbacks"
INT, DICT = "Input should be a valid integer", "Input should be a valid dictionary"
MALFORMED: list[tuple[Change, str]] = [
    (put("state", []), f"state: {DICT}"),
    (put("state/model", [1, 2]), f"state/model: {DICT}"),
    (put("state/model", ...), "state/model: Field required"),
    (put(WEIGHT, 3), f"{WEIGHT}: Input should be an instance of Tensor"),
    (put(f"{TIME}/batch", "two"), f"{TIME}/batch: {INT}"),
    (put(f"{TIME}/batch", -1), f"{TIME}/batch: Input should be greater than or equal to 0"),
    (put(f"{TIME}/batch", True), f"{TIME}/batch: {INT}"),
    (put(f"{TIME}/epoch", 2**40), f"{TIME}/epoch: Input should be less than or equal to 100000"),
    (put(f"{TIME}/token", ...), f"{TIME}/token: Field required"),
    (put(f"{TIME}/total_wct", 1.0), f"{TIME}/total_wct: Input should be a valid timedelta"),
    (put("state/rank_zero_seed", 2**32 - 2**16), "state/rank_zero_seed: Input should be less than 4294901760"),
    (put("state/algorithms", ["FusedOptimizer"]), "state/algorithms/0: Input should be a valid tuple"),
    (put("state/callbacks", ...), "state/callbacks: Field required"),
    (put("state/dataset_state", {"train": 3, "eval": {}}), f"state/dataset_state/train: {DICT}"),
    (put("rng", ...), "rng: Field required"),
    (put("rng", []), "rng: List should have at least 1 item"),
    (put("rng/0/torch", "x"), "rng/0/torch: Input should be an instance of Tensor"),
    # NumPy does not check the position, and reads beyond the end of the words
    (put("rng/0/numpy", ("MT19937", (1,) * 624, 10**9, 0, 0.0)), "rng/0/numpy/2: Input should be less than or equal"),
    (put("rng/0/numpy", ...), "rng/0/numpy: Field required"),
]
# Well-formed, but different from the run's own keys, lengths or shapes.
UNFIT: list[tuple[Change, str]] = [
    (put(f"{SCHEDULE}/last_epoch", ...), f"{SCHEDULE}: has no last_epoch"),
    (put(f"{SCHEDULE}/base_lrs", [0.1]), f"{SCHEDULE}/base_lrs: has no 1"),
    (put(f"{SCHEDULE}/step", "x"), f"{SCHEDULE}: has 'step', which this run does not have"),
    (put("state/schedulers", {}), "state/schedulers: has no LambdaLR"),
    (put(f"{ADAMW}/param_groups/0/params", []), f"{ADAMW}/param_groups/0/params: has no 0"),
    (put(f"{ADAMW}/state/{EMBEDDINGS}/exp_avg", torch.ones(1)), f"{ADAMW}/state/{EMBEDDINGS}/exp_avg: has the shape"),
    (put(f"{ADAMW}/state/{EMBEDDINGS}", ...), f"{ADAMW}/state: has no {EMBEDDINGS}"),
    (put("state/optimizers", {"Adam": {}}), "state/optimizers: has no AdamW and has 'Adam', which this run does not"),
    (put(f"{CALLBACKS}/RunHistory/wall_seconds", "x"), f"{CALLBACKS}/RunHistory/wall_seconds: Input should be a valid"),
    (put(f"{CALLBACKS}/RunHistory/resumed", [{}]), f"{CALLBACKS}/RunHistory/resumed/0/batch: Field required"),
    (put(f"{CALLBACKS}/LossMonitor", {}), f"{CALLBACKS}/LossMonitor/losses: Field required"),
    (put(f"{CALLBACKS}/ThroughputMonitor/batches", [[3]]), f"{CALLBACKS}/ThroughputMonitor/batches/0/0: Input should"),
    (
        put(f"{CALLBACKS}/MicrobatchHistory/changes", [{"batch": 1, "from": 8, "to": 0}]),
        f"{CALLBACKS}/MicrobatchHistory/changes/0/to: Input should be greater than 0",
    ),
    (put(WEIGHT, torch.ones(500, 128)), f"{WEIGHT}: has the shape (500, 128), not (400"),
    (put("state/model/more", torch.ones(1)), "state/model: has 'more', which this run does not have"),
    (put(WEIGHT, ...), f"state/model: has no {EMBEDDINGS}"),
]


def in_runs() -> list[Path]:
    return sorted(path for path in Path("runs").rglob("*") if not path.name.endswith(".lock"))


@pytest.mark.parametrize(("change", "message"), MALFORMED, ids=[message for _, message in MALFORMED])
def test_a_malformed_checkpoint_is_refused_before_any_file_is_changed(
    change: Change, message: str, valid_checkpoint: Path
) -> None:
    Path("runs/quickstart").mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        run(changed(valid_checkpoint, change), *BRIEF)
    assert f"checkpoint.load: changed.pt does not fit this run: {message}" in str(error.value)
    assert "; use the model" in str(error.value) or "; use another checkpoint" in str(error.value)
    assert in_runs() == [Path("runs/quickstart")]


@pytest.mark.parametrize(("change", "message"), UNFIT, ids=[message for _, message in UNFIT])
def test_an_entry_that_does_not_fit_the_run_is_named(
    change: Change, message: str, valid_checkpoint: Path, state: State
) -> None:
    checkpoint = torch.load(valid_checkpoint, weights_only=False)
    keep_loadable(copy.deepcopy(checkpoint), state, weights_only=False)
    change(checkpoint)
    with pytest.raises(MalformedError, match=f"^{re.escape(message)}"):
        keep_loadable(checkpoint, state, weights_only=False)


@pytest.mark.parametrize(("change", "message"), [UNFIT[0], UNFIT[-1]])
def test_a_checkpoint_that_does_not_fit_leaves_the_earlier_run_unchanged(
    change: Change, message: str, valid_checkpoint: Path
) -> None:
    Path("runs/quickstart").mkdir(parents=True)
    Path("runs/quickstart/report.json").touch()
    with pytest.raises(ConfigError) as error:
        run(changed(valid_checkpoint, change), *BRIEF)
    assert f"checkpoint.load: changed.pt does not fit this run: {message}" in str(error.value)
    assert "; use the model" in str(error.value) or "; use another checkpoint" in str(error.value)
    assert in_runs() == [Path("runs/quickstart"), Path("runs/quickstart/report.json")]


@pytest.mark.parametrize("path", [f"{TIME}/batch", f"{SCHEDULE}/base_lrs"])
def test_a_malformed_checkpoint_is_one_line_and_exit_status_2(path: str, valid_checkpoint: Path) -> None:
    done = fork_train(changed(valid_checkpoint, put(path, "x")), *BRIEF).wait()
    assert done.status == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("train.py: checkpoint.load: changed.pt ")


def test_every_callback_with_a_state_dict_declares_its_fields(valid_checkpoint: Path) -> None:
    """Only the fields that a callback declares are restored."""
    kept = torch.load(valid_checkpoint, weights_only=False)["state"]["callbacks"]
    ours = {name for name, state in kept.items() if state and name != "WholeCheckpointSaver"}
    known = {c.__qualname__: c for c in every_subclass(Callback) if c.__module__.startswith("composer_speedups")}
    assert ours >= {"LossMonitor", "RunHistory", "ThroughputMonitor", "Host"}
    for name in ours:
        fields = known[name].checkpoint_fields  # type: ignore[attr-defined]
        assert validate(kept[name], fields) == kept[name]
    for name, cls in known.items():
        if cls is not SavedCallback:
            method: Any = vars(next(base for base in cls.__mro__ if "state_dict" in vars(base)))["state_dict"]
            assert method.__module__.startswith("composer_speedups") is hasattr(cls, "checkpoint_fields"), name


def every_subclass(cls: type) -> set[type]:
    return {cls}.union(*map(every_subclass, cls.__subclasses__()))


def test_weights_only_ignores_malformed_entries_other_than_weights(valid_checkpoint: Path) -> None:
    def spoil(checkpoint: dict[str, Any]) -> None:
        checkpoint["state"] = {"model": checkpoint["state"]["model"], "timestamp": "x", "optimizers": 3}
        del checkpoint["rng"]

    assert run(changed(valid_checkpoint, spoil), "checkpoint.weights_only=true", *BRIEF)["training"]["batches"] == 4


@pytest.mark.parametrize("weights_only", ["false", "true"])
def test_loading_the_weights_only_is_suggested_unless_it_is_set(weights_only: str, valid_checkpoint: Path) -> None:
    load = changed(valid_checkpoint, put("state/algorithms", 3))
    with pytest.raises(ConfigError) as error:
        run(load, f"checkpoint.weights_only={weights_only}", *BRIEF)
    assert ("checkpoint.weights_only=true" in str(error.value)) is (weights_only == "false")


def test_checkpoints_of_another_task_or_vocabulary_are_refused() -> None:
    saved = ["trainer.max_duration=2ba", "trainer.eval_batches=1", "checkpoint.interval=2ba", "export=false"]
    run(*saved, "model.task=mlm", "run_name=mlm")
    run(*saved, "data.vocab_size=300", "run_name=small")
    for name, message in (
        ("mlm", r"state/model: has no model\.\w+\.pooler\S+ and has 'model\.cls\S+', which .*model\.task"),
        ("small", r"word_embeddings.weight: has the shape \(300, 128\), .*data\.vocab_size"),
    ):
        for only in ("checkpoint.weights_only=false", "checkpoint.weights_only=true"):
            with pytest.raises(ConfigError, match=message):
                run(f"checkpoint.load=runs/{name}/checkpoints/ep0-ba2-rank0.pt", only, *BRIEF)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://example.org/a.pt", "is an address from which Composer cannot load checkpoints (https)"),
        ("file:///tmp/a.pt", "is an address from which Composer cannot load checkpoints (file)"),
        ("ftp://example.org/a.pt", "is an address from which Composer cannot load checkpoints (ftp)"),
        ("wandb://a/b.pt", "is an address from which Composer cannot load checkpoints (wandb)"),
        ("https:/example.org/a.pt", "is not a file: https:/example.org/a.pt"),
        ("s3:bucket/a.pt", "is not a file: s3:bucket/a.pt"),
        ("s3:///a.pt", "does not name a bucket: s3:///a.pt"),
        ("s3://", "does not name a bucket: s3://"),
        ("file:a.pt", "is not a file: file:a.pt"),
        ("run:one.pt", "contains a colon"),
        ("a{b.pt", "cannot be formatted"),
        ("a{}b.pt", "is not a file"),
        ("a{rank.x}.pt", "cannot be formatted"),
    ],
)
def test_invalid_checkpoint_uris_are_refused(address: str, message: str, valid_checkpoint: Path) -> None:
    shutil.copy(valid_checkpoint, "run:one.pt")
    for more in ([], ["checkpoint.trust_checkpoint=true"], ["run_name=x", "checkpoint.interval=2ba"]):
        with pytest.raises(ConfigError) as error:
            run(f"checkpoint.load='{address}'", *more)
        assert "checkpoint.load" in str(error.value)
        assert message in str(error.value)
    assert in_runs() == []


def test_an_unreachable_object_store_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer.trainer import trainer as composer_trainer

    def fails(_: str) -> Any:
        raise ModuleNotFoundError("No module named 'boto3'")

    monkeypatch.setattr(composer_trainer, "maybe_create_object_store_from_uri", fails)
    with pytest.raises(ConfigError, match=r"checkpoint\.load: s3://bucket/a\.pt cannot be loaded \(No module named"):
        run("checkpoint.load=s3://bucket/a.pt", *BRIEF)


@pytest.mark.exhaustive
def test_a_long_error_of_an_object_store_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer.trainer import trainer as composer_trainer

    def fails(_: str) -> Any:
        raise OSError("x" * 301)

    monkeypatch.setattr(composer_trainer, "maybe_create_object_store_from_uri", fails)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(x{300}\); "):
        run("checkpoint.load=s3://bucket/a.pt", *BRIEF)
