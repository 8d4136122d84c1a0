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

from composer_speedups.core.errors import ConfigError
from composer_speedups.train import fit
from composer_speedups.train.checkpoints.reading import admit
from composer_speedups.train.checkpoints.saver import plain_generators
from composer_speedups.train.checkpoints.structure import MalformedError, conforming
from composer_speedups.train.cli import exit_codes
from tests.helpers.forks import Fork
from tests.helpers.jobs import run, short_checkpoint

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
MALFORMED: list[tuple[Change, str]] = [
    (put("state", []), "state is missing"),
    (put("state/model", [1, 2]), "state/model is a list, not a dict"),
    (put("state/model", ...), "state/model is missing"),
    (put(WEIGHT, 3), f"{WEIGHT} is an int, not a tensor"),
    (put(WEIGHT, torch.eye(3).to_sparse()), f"{WEIGHT} is a sparse or nested tensor"),
    (put(WEIGHT, torch.empty(3, device="meta")), f"{WEIGHT} is a tensor without values"),
    (put(f"{TIME}/batch", "two"), f"{TIME}/batch is a str, not an int"),
    (put(f"{TIME}/batch", -1), f"{TIME}/batch is -1"),
    (put(f"{TIME}/batch", True), f"{TIME}/batch is a bool"),
    (put(f"{TIME}/epoch", 2**10), f"{TIME}/epoch is 1024, and batch is 2"),
    (put(f"{TIME}/epoch", 2**40), f"{TIME}/epoch is 1099511627776, not within 0 to 99999"),
    (put(f"{TIME}/token", ...), f"{TIME} has no token"),
    (put(f"{TIME}/total_wct", 1.0), f"{TIME}/total_wct is a float, not a timedelta"),
    (put("state/timestamp", {}), "state/timestamp has no Timestamp"),
    (put("state/rank_zero_seed", "17"), "state/rank_zero_seed is a str, not an int"),
    (put("state/rank_zero_seed", 2**40), "state/rank_zero_seed is 1099511627776"),
    (put("state/rank_zero_seed", 2**32 - 2**16), "state/rank_zero_seed is 4294901760, not within 0 to 4294901759"),
    (put("state/rank_zero_seed", torch.tensor(17)), "state/rank_zero_seed is a Tensor"),
    (put("state/algorithms", {"a": {}}), "state/algorithms is a dict, not a list"),
    (put("state/algorithms", ["FusedOptimizer"]), "state/algorithms/0 is a str, not a tuple"),
    (put("state/callbacks", ...), "state/callbacks is missing"),
    (put("state/dataset_state", {"train": 3, "eval": {}}), "state/dataset_state/train is an int, not a dict"),
    (put("rng", ...), "rng is nothing, not a list"),
    (put("rng", []), "rng is empty"),
    (put("rng/0/torch", torch.zeros(9, dtype=torch.uint8)), "rng/0/torch is not a state of that generator"),
    (put("rng/0/torch", "x"), "rng/0/torch is a str, not a tensor"),
    (put("rng/0/python", (3, (1, 2), None)), "rng/0/python is not a state of that generator"),
    (put("rng/0/numpy", ("MT19937", (1, 2), 0, 0, 0.0)), "rng/0/numpy is not a state of that generator"),
    (put("rng/0/numpy", ("PCG64", (1,) * 624, 0, 0, 0.0)), "rng/0/numpy is not a state of that generator"),
    (put("rng/0/numpy", ("MT19937", (1,) * 624, 625, 0, 0.0)), "rng/0/numpy/2 is 625, not within 0 to 624"),
    (put("rng/0/numpy", ("MT19937", (1,) * 624, 624, 2, 0.0)), "rng/0/numpy/3 is 2, not within 0 to 1"),
    (put("rng/0/numpy", ...), "rng/0 has no numpy"),
]
# Well-formed, but different from the run's own keys, lengths or shapes.
UNFIT: list[tuple[Change, str]] = [
    (put(f"{SCHEDULE}/last_epoch", ...), f"{SCHEDULE} has no last_epoch"),
    (put(f"{SCHEDULE}/base_lrs", [0.1]), f"{SCHEDULE}/base_lrs is a list of 1 and not a list of 2"),
    (put(f"{SCHEDULE}/step", "x"), f"{SCHEDULE} has 'step', which this run does not have"),
    (put("state/schedulers", {}), "state/schedulers has no LambdaLR"),
    (put(f"{ADAMW}/param_groups/0/lr", "x"), f"{ADAMW}/param_groups/0/lr is a str, not a float"),
    (put(f"{ADAMW}/param_groups/0/params", []), f"{ADAMW}/param_groups/0/params is a list of 0"),
    (put(f"{ADAMW}/param_groups", []), f"{ADAMW}/param_groups is a list of 0 and not a list of 2"),
    (
        put(f"{ADAMW}/state/{EMBEDDINGS}/exp_avg", torch.ones(1)),
        f"{ADAMW}/state/{EMBEDDINGS}/exp_avg has the shape",
    ),
    (put(f"{ADAMW}/state/{EMBEDDINGS}", ...), f"{ADAMW}/state has no {EMBEDDINGS}"),
    (put("state/optimizers", {"Adam": {}}), "state/optimizers has no AdamW, which this run has"),
    (
        put(f"{CALLBACKS}/RunHistory/wall_seconds", "x"),
        f"{CALLBACKS}/RunHistory/wall_seconds is a str, not a float",
    ),
    (
        put(f"{CALLBACKS}/RunHistory/wall_seconds", 2**2000),
        f"{CALLBACKS}/RunHistory/wall_seconds is an int too large for a float",
    ),
    (put(f"{CALLBACKS}/RunHistory/resumed", [{}]), f"{CALLBACKS}/RunHistory/resumed/0 has no batch"),
    (put(f"{CALLBACKS}/FiniteLoss", {}), f"{CALLBACKS}/FiniteLoss has no losses"),
    (put(f"{CALLBACKS}/ThroughputMonitor/batches", [[3]]), f"{CALLBACKS}/ThroughputMonitor/batches/0/0 is an int"),
    *(
        (
            put(f"{CALLBACKS}/MicrobatchHistory/changes", [{"batch": 1, "from": 8, "to": size}]),
            f"{CALLBACKS}/MicrobatchHistory/changes/0/to is {size}, not within 1 to",
        )
        for size in (0, -4)
    ),
    (
        put(WEIGHT, torch.ones(500, 128)),
        f"{WEIGHT} has the shape (500, 128), not (400",
    ),
    (put(WEIGHT, torch.ones(400, 128).long()), f"{WEIGHT} has the dtype int64, not float32"),
    (put(WEIGHT, ...), f"state/model has no {EMBEDDINGS}"),
    (put("state/model/more", torch.ones(1)), "state/model has 'more', which this run's model does not have"),
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
    assert f"checkpoint.load: changed.pt is malformed: {message}" in str(error.value)
    assert "; use the model" in str(error.value) or "; use another checkpoint" in str(error.value)
    assert in_runs() == [Path("runs/quickstart")]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("state/rank_zero_seed", 2**32 - 2**16 - 1),
        ("rng/0/numpy", ("MT19937", (2**32 - 1,) * 624, 624, 1, 0.5)),  # with a cached Gaussian
        ("rng/0/python", (3, (*(2**32 - 1,) * 624, 624), None)),
    ],
)
def test_the_largest_seed_and_generator_states_are_accepted(
    path: str, value: Any, valid_checkpoint: Path, state: State
) -> None:
    checkpoint = torch.load(valid_checkpoint, weights_only=False)
    plain_generators(checkpoint)
    set_entry(checkpoint, path, value)
    admit(checkpoint, state, weights_only=False)
    for key in [int(key) if key.isdigit() else key for key in path.split("/")]:
        checkpoint = checkpoint[key]  # type: ignore[index]
    assert checkpoint == value  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("change", "message"), UNFIT, ids=[message for _, message in UNFIT])
def test_an_entry_that_does_not_fit_the_run_is_named(
    change: Change, message: str, valid_checkpoint: Path, state: State
) -> None:
    checkpoint = torch.load(valid_checkpoint, weights_only=False)
    plain_generators(checkpoint)
    admit(copy.deepcopy(checkpoint), state, weights_only=False)
    change(checkpoint)
    with pytest.raises(MalformedError, match=f"^{re.escape(message)}"):
        admit(checkpoint, state, weights_only=False)


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
    load = changed(valid_checkpoint, put(path, "x"))

    def job() -> None:
        with exit_codes():
            run(load, *BRIEF)

    done = Fork(job).wait()
    assert done.status == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("train.py: checkpoint.load: changed.pt ")


def test_every_callback_with_a_state_dict_declares_its_fields(valid_checkpoint: Path) -> None:
    """Only the fields that a callback declares are restored."""
    kept = torch.load(valid_checkpoint, weights_only=False)["state"]["callbacks"]
    ours = {name for name, state in kept.items() if state and name != "WholeCheckpointSaver"}
    known = {c.__qualname__: c for c in every_subclass(Callback) if c.__module__.startswith("composer_speedups")}
    assert ours >= {"EngagementReport", "RunHistory", "ThroughputMonitor", "_TechniqueKeeper"}
    for name in ours:
        fields = known[name].checkpoint_fields  # type: ignore[attr-defined]
        assert conforming(kept[name], fields, name) == kept[name]
    for name, cls in known.items():
        declares = "state_dict" in vars(cls)
        assert declares is hasattr(cls, "checkpoint_fields"), name


def every_subclass(cls: type) -> set[type]:
    return {cls}.union(*map(every_subclass, cls.__subclasses__()))


def test_weights_only_ignores_malformed_entries_other_than_weights(valid_checkpoint: Path) -> None:
    def spoil(checkpoint: dict[str, Any]) -> None:
        checkpoint["state"] = {"model": checkpoint["state"]["model"], "timestamp": "x", "optimizers": 3}
        del checkpoint["rng"]

    assert run(changed(valid_checkpoint, spoil), "checkpoint.weights_only=true", *BRIEF)["training"]["batches"] == 4


def test_checkpoints_of_another_task_or_vocabulary_are_refused() -> None:
    saved = ["trainer.max_duration=2ba", "trainer.eval_batches=1", "checkpoint.interval=2ba", "export=false"]
    run(*saved, "model.task=mlm", "run_name=mlm")
    run(*saved, "data.vocab_size=300", "run_name=small")
    for name, message in (
        ("mlm", r"state/model has no model\.\w+\.pooler\S+ and has 'model\.cls\S+', which .*model\.task"),
        ("small", r"word_embeddings.weight has the shape \(300, 128\), .*data\.vocab_size"),
    ):
        for only in ("checkpoint.weights_only=false", "checkpoint.weights_only=true"):
            with pytest.raises(ConfigError, match=message):
                run(f"checkpoint.load=runs/{name}/checkpoints/ep0-ba2-rank0.pt", only, *BRIEF)


def test_a_checkpoint_with_a_wrong_batch_in_its_name_is_not_the_newest(valid_checkpoint: Path) -> None:
    folder = Path("runs/mine/checkpoints")
    job = ["run_name=mine", "checkpoint.interval=2ba", "checkpoint.keep=1", *BRIEF[1:]]
    run(*job, "trainer.max_duration=2ba")
    Path("runs/mine/report.json").unlink()
    true = folder / "ep0-ba2-rank0.pt"
    (folder / "ep0-ba50-rank0.pt").symlink_to(true.name)
    with pytest.raises(ConfigError, match=r"ba50-rank0\.pt does not match its name: .* in epoch 0 after batch 2; "):
        run(f"checkpoint.load={folder}/ep0-ba50-rank0.pt", "run_name=other", *BRIEF)
    shutil.copy(true, "ep3-ba9-rank0.pt")
    Path("latest-rank0.pt").symlink_to("ep3-ba9-rank0.pt")
    with pytest.raises(ConfigError, match=r"latest-rank0\.pt does not match its name"):
        run("checkpoint.load=latest-rank0.pt", "run_name=other", *BRIEF)
    with pytest.warns(UserWarning, match=r"skipped a checkpoint: .*ba50-rank0\.pt does not match its name"):
        report = run(*job, "trainer.max_duration=4ba")
    assert report["resumed"] == [{"batch": 2, "checkpoint": "ep0-ba2-rank0.pt"}]
    assert (folder / "ep0-ba4-rank0.pt").exists()


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
    with pytest.raises(ConfigError, match=r"checkpoint\.load: s3://bucket/a\.pt cannot be reached \(No module named"):
        run("checkpoint.load=s3://bucket/a.pt", *BRIEF)


@pytest.mark.parametrize("size", [0, -1])
def test_a_micro_batch_below_one_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.microbatch_size must be at least 1, not {size}"):
        run(f"trainer.microbatch_size={size}", *BRIEF)
