"""Checkpoints: nothing in them is executed unless the user trusts the file, and those of another run are refused."""

from __future__ import annotations

import contextlib
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composer.utils import ObjectStore

from composer_speedups.core.errors import ConfigError
from composer_speedups.train.checkpoints import DamagedCheckpointError, read_checkpoint
from tests.helpers.common import trained
from tests.helpers.jobs import MARKER, Payload, run

BRIEF = ("trainer.max_duration=3ba", "trainer.eval_batches=1", "export=false")
OWN = ("checkpoint.interval=2ba", "run_name=quickstart", *BRIEF)
WEIGHTS = "checkpoint.weights_only=true"


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of two batches."""
    with contextlib.chdir(folder := tmp_path_factory.mktemp("valid")):
        run("trainer.max_duration=2ba", "trainer.eval_batches=1", "checkpoint.interval=2ba", "export=false")
    return folder / "runs" / "quickstart" / "checkpoints" / "ep0-ba2-rank0.pt"


def by_pickle(checkpoint: dict[str, Any]) -> None:
    checkpoint["state"]["run_name"] = Payload()


def by_expression(checkpoint: dict[str, Any]) -> None:
    """Composer evaluates ``algorithms.<repr>``."""
    expression = f"Alibi(max_sequence_length=__import__('os').mkdir({str(MARKER)!r}))"
    checkpoint["state"]["algorithms"].append(("Alibi", {"repr": expression}))


def by_underscore(checkpoint: dict[str, Any]) -> None:
    """Composer strips a leading underscore from any key and then treats it as the key without one."""
    by_expression(checkpoint)
    checkpoint["state"]["_algorithms"] = checkpoint["state"]["algorithms"]
    checkpoint["state"]["algorithms"] = checkpoint["state"]["_algorithms"][:-1]


def write(valid: Path, attack: Callable[[dict[str, Any]], None], path: str) -> None:
    checkpoint = torch.load(valid, weights_only=False)
    attack(checkpoint)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, path)


def in_own_folder(valid: Path, attack: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """A run that was interrupted after the checkpoint."""
    shutil.copytree(valid.parents[1], "runs/quickstart", symlinks=True)
    Path("runs/quickstart/report.json").unlink()
    write(valid, attack, f"runs/quickstart/checkpoints/{valid.name}")


@pytest.mark.parametrize("door", ["weights", "resume", "trust"])
@pytest.mark.parametrize(
    ("attack", "named"), [(by_pickle, "posix.mkdir"), (by_expression, "Alibi"), (by_underscore, None)]
)
@pytest.mark.pins
def test_a_hostile_checkpoint_executes_nothing_unless_it_is_trusted(
    attack: Callable[[dict[str, Any]], None], named: str | None, door: str, valid: Path
) -> None:
    write(valid, attack, "hostile.pt")
    if door == "resume":
        in_own_folder(valid, attack)
    if door == "trust":
        with warnings.catch_warnings(), contextlib.suppress(Exception):  # the run may fail afterwards
            warnings.simplefilter("ignore")
            run("checkpoint.load=hostile.pt", "checkpoint.trust_checkpoint=true", *BRIEF)
        assert MARKER.exists()
        return
    arguments = OWN if door == "resume" else ("checkpoint.load=hostile.pt", WEIGHTS, *BRIEF)
    if named is None:
        assert run(*arguments)["training"]["batches"] == 3
    else:
        with pytest.raises(ConfigError, match=rf"^checkpoint\..*refused, .*{named}.*trust_checkpoint=true"):
            run(*arguments)
    assert not MARKER.exists()


def test_the_state_of_another_runs_checkpoint_needs_trust_and_its_weights_do_not(valid: Path) -> None:
    Path("runs/quickstart").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is of another run; set checkpoint\.weights_only=true .*trust_checkpoint=t"):
        run(f"checkpoint.load={valid}", *BRIEF)
    assert [path for path in Path("runs").rglob("*") if not path.name.endswith(".lock")] == [Path("runs/quickstart")]
    assert run(f"checkpoint.load={valid}", WEIGHTS, *BRIEF)["resumed"] == []
    assert run(f"checkpoint.load={valid}", "checkpoint.trust_checkpoint=true", *BRIEF)["resumed"] != []


class FakeStore(ObjectStore):
    """An object store whose bucket is a local folder."""

    def get_object_size(self, object_name: str) -> int:
        return Path("bucket", object_name).stat().st_size

    def download_object(self, object_name: str, filename: Any, *_: Any, **__: Any) -> None:
        shutil.copy(Path("bucket", object_name), filename)


def test_weights_are_read_from_an_address(valid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.trainer.trainer.maybe_create_object_store_from_uri", lambda _: FakeStore())
    write(valid, by_pickle, "bucket/run/one.pt")
    with pytest.raises(ConfigError, match=r"^checkpoint\.load: refused, .*posix\.mkdir"):
        run("checkpoint.load=s3://bucket/run/one.pt", WEIGHTS, *BRIEF)
    shutil.copy(valid, "bucket/run/one.pt")
    assert run("checkpoint.load=s3://bucket/run/one.pt", WEIGHTS, *BRIEF)["training"]["batches"] == 3


def test_an_unreachable_object_store_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> Any:
        raise ModuleNotFoundError("No module named 'boto3'")

    monkeypatch.setattr("composer.trainer.trainer.maybe_create_object_store_from_uri", fails)
    with pytest.raises(ConfigError, match=r"^checkpoint\.load cannot be loaded \(No module named 'boto3'\)"):
        run("checkpoint.load=s3://bucket/a.pt", WEIGHTS, *BRIEF)


def test_what_composer_unpacks_unchecked_is_refused(valid: Path) -> None:
    shutil.copy(valid, "file.tar")  # Composer unpacks by name
    with tarfile.open("real.pt", "w") as tar:
        tar.add(valid, "composer_states.pt")
    for name, problem in (("file.tar", "is no .pt"), ("s3://a/b.pt.symlink", "is no .pt"), ("real.pt", "cannot be lo")):
        with pytest.raises(ConfigError, match=rf"checkpoint\.load: {name} {problem}"):
            run(f"checkpoint.load={name}", WEIGHTS)
    assert not list(Path("runs").glob("q*"))


class Crafted:
    """Pickles as a NumPy dtype or array that NumPy itself does not create."""

    def __init__(self, *pickled: Any) -> None:
        self.pickled = pickled

    def __reduce__(self) -> Any:
        return self.pickled


def test_numpy_builds_nothing_from_a_checkpoint_and_its_random_state_is_read(valid: Path, tmp_path: Path) -> None:
    """An array with a field of Python objects at an offset of 1 GiB crashes NumPy."""
    objects = Crafted(np.dtype, ("O8", False, True))
    kind = Crafted(np.dtype, ("f8", False, True), (3, "<", None, ("a",), {"a": (objects, 2**30)}, 8, 8, 0))
    reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    array = Crafted(reconstruct, (np.ndarray, (0,), b"b"), (1, (624,), kind, False, b"\1" * 8 * 624))
    write(valid, lambda held: held["rng"][0].update(numpy=("MT19937", array, 624, 0, 0.0)), "crafted.pt")
    with pytest.raises(DamagedCheckpointError, match="unpack requires a buffer of 2496 bytes"):
        read_checkpoint("crafted.pt", "checkpoint.load")

    trained(save_folder=str(tmp_path), save_interval="2ba", save_filename="ba{batch}.pt")
    saved = torch.load(tmp_path / "ba2.pt", weights_only=False)["rng"][0]["numpy"]
    words = read_checkpoint(str(tmp_path / "ba2.pt"), "checkpoint.load")["rng"][0]["numpy"]
    assert words[1] == saved[1].tolist()
    np.random.RandomState().set_state(words)


@pytest.mark.pins
def test_weights_of_another_model_are_refused() -> None:
    saved = ["trainer.max_duration=2ba", "trainer.eval_batches=1", "checkpoint.interval=2ba", "export=false"]
    run(*saved, "model.task=mlm", "run_name=mlm")
    run(*saved, "data.vocab_size=300", "run_name=small")
    for name, message in (
        ("mlm", r"\.pooler\S+ is missing in it and \(128.* in the model; .*model\.task"),
        ("small", r"word_embeddings\.weight is \(300, 128\) in it and \(400, 128\) in the model; .*data\.vocab_size"),
    ):
        load = f"checkpoint.load=runs/{name}/checkpoints/ep0-ba2-rank0.pt"
        for door in ([WEIGHTS, "run_name=other"], [f"run_name={name}"]):
            with pytest.raises(ConfigError, match=message):
                run(load, *door, *BRIEF)


def test_a_flipped_bit_is_detected_or_changes_no_weight(valid: Path) -> None:
    """torch verifies no checksums: training would continue with a flipped bit."""
    whole, path = valid.read_bytes(), Path("flipped.pt")
    expected = torch.load(valid, weights_only=False)["state"]["model"]
    generator = torch.Generator().manual_seed(0)
    damaged = 0
    for attempt in range(40):
        position = int(torch.randint(len(whole), (), generator=generator))
        if attempt % 4 == 0:
            path.write_bytes(whole[:position])
        else:
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << attempt % 8]) + whole[position + 1 :])
        try:
            read_checkpoint(str(path), "checkpoint.load")
        except DamagedCheckpointError:
            damaged += 1
        else:  # the byte is between the archive's members
            checkpoint = torch.load(path, weights_only=False)["state"]["model"]
            torch.testing.assert_close(checkpoint, expected, rtol=0, atol=0)
    assert damaged > 30
