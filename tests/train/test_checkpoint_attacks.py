"""Malicious checkpoints: their code is never executed unless the user trusts the file."""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import shutil
import signal
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composer.trainer import trainer as composer_trainer
from composer.utils import ObjectStore, reproducibility
from composer.utils import checkpoint as composer_checkpoint

from composer_speedups import FusedOptimizer, SDPAAttention
from composer_speedups.core.errors import ConfigError
from composer_speedups.train import run_folder as runs
from composer_speedups.train.checkpoints import reading
from composer_speedups.train.checkpoints.reading import (
    DamagedCheckpointError,
    check_checkpoint,
    keep_loadable,
    restricted_loading,
)
from composer_speedups.train.checkpoints.saver import plain_generators
from tests.helpers.common import make_trainer
from tests.helpers.forks import Fork
from tests.helpers.jobs import run, short_checkpoint
from tests.helpers.payload import MARKER, Payload

Attack = Callable[[dict[str, Any]], None]
BRIEF = ("trainer.max_duration=3ba", "trainer.eval_batches=1", "export=false")


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


refused = pytest.mark.parametrize(("attack", "named"), [(by_pickle, "posix.mkdir"), (by_expression, "Alibi")])


@pytest.fixture(scope="module")
def valid_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a short run."""
    return short_checkpoint(tmp_path_factory.mktemp("valid_checkpoint"))


def poisoned(valid_checkpoint: Path, attack: Attack) -> Path:
    checkpoint = torch.load(valid_checkpoint, weights_only=False)
    attack(checkpoint)
    torch.save(checkpoint, "poisoned.pt")
    return Path("poisoned.pt")


@refused
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.pins
def test_an_attack_is_refused_before_any_file_is_changed(
    attack: Attack, named: str, weights_only: bool, valid_checkpoint: Path
) -> None:
    path = poisoned(valid_checkpoint, attack)
    Path("runs/quickstart").mkdir(parents=True)
    message = rf"checkpoint\.load: poisoned\.pt: refused, .*{named}.*trust_checkpoint=true"
    with pytest.raises(ConfigError, match=message):
        run(f"checkpoint.load={path}", f"checkpoint.weights_only={json.dumps(weights_only)}")
    assert not MARKER.exists()
    assert sorted(Path("runs").rglob("*")) == [Path("runs/.quickstart.lock"), Path("runs/quickstart")]


@refused
@pytest.mark.pins
def test_a_file_that_changes_after_the_check_is_refused(
    attack: Attack, named: str, valid_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "check_checkpoint", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=rf"checkpoint\.load: poisoned\.pt: refused, .*{named}"):
        run(f"checkpoint.load={poisoned(valid_checkpoint, attack)}")
    assert not MARKER.exists()


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.pins
def test_keys_with_a_leading_underscore_are_dropped(weights_only: bool, valid_checkpoint: Path) -> None:
    load = f"checkpoint.load={poisoned(valid_checkpoint, by_underscore)}"
    report = run(load, f"checkpoint.weights_only={json.dumps(weights_only)}", *BRIEF)
    assert report["training"]["batches"] == 3
    assert not MARKER.exists()


@pytest.mark.parametrize("attack", [by_pickle, by_expression, by_underscore])
def test_every_attack_works_with_trust_checkpoint(attack: Attack, valid_checkpoint: Path) -> None:
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # the run may fail afterwards
        warnings.simplefilter("ignore")
        run(f"checkpoint.load={poisoned(valid_checkpoint, attack)}", "checkpoint.trust_checkpoint=true", *BRIEF)
    assert MARKER.exists()


@pytest.mark.parametrize("weights_only", [False, True])
def test_composer_gets_only_known_keys_and_the_algorithms_of_the_run(weights_only: bool) -> None:
    """Other keys of the file are not read at all."""
    trainer = make_trainer([SDPAAttention(), FusedOptimizer()])
    checkpoint = {"state": trainer.state.state_dict(), "rng": reproducibility.get_rng_state(), "_state": {}}
    plain_generators(checkpoint)
    checkpoint["state"] |= {"_model": Payload(), "is_model_ddp": True, "precision": "fp32", "_seed": Payload()}
    checkpoint["state"]["callbacks"]["InMemoryLogger"] = Payload()
    keep_loadable(checkpoint, trainer.state, weights_only=weights_only)
    trainer.close()
    if weights_only:
        assert [*checkpoint] == ["state"]
        assert [*checkpoint["state"]] == ["model"]
        return
    assert [*checkpoint] == ["state", "rng"]
    assert {*checkpoint["state"]} <= {*trainer.state.serialized_attributes}
    algorithms = checkpoint["state"]["algorithms"]
    assert type(algorithms) is dict, "Composer evaluates what it finds in a list"
    assert {*algorithms} == {"SDPAAttention", "FusedOptimizer"}
    assert checkpoint["state"]["callbacks"]["InMemoryLogger"] == {}


def test_autoresume_refuses_an_attack(valid_checkpoint: Path) -> None:
    settings = ["checkpoint.interval=2ba", "run_name=mine", *BRIEF]
    run(*settings)
    folder = Path("runs/mine/checkpoints")
    Path("runs/mine/report.json").unlink()
    shutil.copy(poisoned(valid_checkpoint, by_pickle), folder / "ep0-ba5-rank0.pt")
    with pytest.raises(ConfigError, match=r"checkpoint\.autoresume: .*ba5-rank0\.pt: refused, .*posix\.mkdir"):
        run(*settings)
    assert not MARKER.exists()


def test_folders_archives_and_their_addresses_are_refused(valid_checkpoint: Path) -> None:
    Path("sharded").mkdir()
    for name in ("file.tar", "file.pt.gz"):  # zip content, but Composer unpacks by name
        shutil.copy(valid_checkpoint, name)
    with tarfile.open("real.pt", "w") as tar:
        tar.add(valid_checkpoint, "composer_states.pt")
    for name, message in (
        ("sharded", "refused, sharded checkpoints are unpickled without checks"),
        ("s3://bucket/run/ep1-ba4", "refused, sharded checkpoints are unpickled without checks"),
        ("s3://bucket/latest-rank0.pt.symlink", "refused, sharded checkpoints are unpickled without checks"),
        ("file.tar", "refused, Composer unpacks an archive to any path in it"),
        ("file.pt.gz", "refused, Composer unpacks an archive"),
        ("s3://bucket/file.tar.gz", "refused, Composer unpacks an archive"),
        ("real.pt", "cannot be loaded"),  # torch decides by the first bytes, zipfile by the last
    ):
        with pytest.raises(ConfigError, match=f"checkpoint.load: {name}:? {message}"):
            run(f"checkpoint.load={name}")
    assert not list(Path("runs").glob("q*"))


class Crafted:
    """Pickles as a NumPy dtype or array that NumPy itself does not create."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: tuple[Any, ...] | None = None) -> None:
        self.pickled = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.pickled


def crafted_array() -> Crafted:
    """Return a float64 array with a field of Python objects at an offset of 1 GiB."""
    objects = Crafted(np.dtype, ("O8", False, True))
    fields = (3, "<", None, ("a",), {"a": (objects, 2**30)}, 8, 8, 0)
    kind = Crafted(np.dtype, ("f8", False, True), fields)
    reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    return Crafted(reconstruct, (np.ndarray, (0,), b"b"), (1, (624,), kind, False, b"\1" * 8 * 624))


def test_crafted_numpy_objects_are_not_built(valid_checkpoint: Path) -> None:
    def by_array(checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"][0]["numpy"] = ("MT19937", crafted_array(), 624, 0, 0.0)

    with pytest.raises(DamagedCheckpointError, match=r"cannot be loaded .*unpack requires a buffer of 2496 bytes"):
        check_checkpoint(str(poisoned(valid_checkpoint, by_array)), "checkpoint.load")


@pytest.mark.exhaustive
def test_crafted_numpy_objects_crash_numpy() -> None:
    """Once they do not, RandomWords is not needed."""
    torch.save(crafted_array(), "array.pt")

    def read_with_numpy_allowed() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        with torch.serialization.safe_globals([np.ndarray, np.dtype, type(np.dtype("f8")), reconstruct]):
            array = torch.load("array.pt", weights_only=True)
        repr(array["a"])

    assert Fork(read_with_numpy_allowed).wait().status == -signal.SIGSEGV


def test_checkpoints_contain_no_numpy_and_composer_loads_their_random_state(valid_checkpoint: Path) -> None:
    with torch.serialization.safe_globals([timedelta, torch.torch_version.TorchVersion]):
        checkpoint = torch.load(valid_checkpoint, weights_only=True)
    words = checkpoint["rng"][0]["numpy"]
    expected = np.random.RandomState()
    expected.set_state(words)
    reproducibility.load_rng_state(checkpoint["rng"])
    assert np.random.random() == expected.random_sample()
    assert type(words[1]) is tuple


@pytest.mark.pins
def test_a_checkpoint_written_by_composer_itself_is_read(tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=str(tmp_path), save_interval="2ba", save_filename="ba{batch}.pt")
    trainer.fit()
    trainer.close()
    path = str(tmp_path / "ba2.pt")
    checkpoint = torch.load(path, weights_only=False)
    assert isinstance(checkpoint["rng"][0]["numpy"][1], np.ndarray)
    check_checkpoint(path, "checkpoint.load")
    kept = reading._contents(reading._read(path), weights_only=False)
    assert kept["rng"][0]["numpy"][1] == checkpoint["rng"][0]["numpy"][1].tolist()
    np.random.RandomState().set_state(kept["rng"][0]["numpy"])


def pickled(name: str, instructions: bytes, compression: int = zipfile.ZIP_STORED) -> str:
    """Write a checkpoint that contains only these pickle instructions; return its name."""
    with zipfile.ZipFile(name, "w", compression) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + instructions + b".")
        archive.writestr("archive/version", "3\n")
    return name


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        (b"})" + b"\x85" * 300_000 + b"Ns", "tuple of more than 10000 values"),  # hashing it overflows the stack
        (b"})" + b"q\0h\0\x86" * 60 + b"Ns", "tuple of more than 10000 values"),  # each twice in the next: takes years
        (b"X\x10\x27\0\0" + b"a" * 10_000, "pickle of more than 9000 bytes"),
        (b"cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R", "allocate a builtins bytearray"),
        (b"ctorch\nFloatTensor\n\x8a\x06\0\0\0\0\0\x01\x85R", "allocate a torch FloatTensor"),
    ],
    ids=["deep", "wide", "large", "bytearray", "tensor"],
)
def test_a_pickle_that_exhausts_stack_time_or_memory_is_refused(instructions: bytes, message: str) -> None:
    path = pickled("bomb.pt", instructions)

    def check() -> None:
        if "9000" in message:
            reading.MAX_PICKLE_BYTES = 9000
        with pytest.raises(ConfigError, match=rf"bomb\.pt: refused, .*({message})"):
            check_checkpoint(path, "checkpoint.load")
        with pytest.raises(pickle.UnpicklingError, match=message):  # as when Composer loads it
            reading._read(path)

    assert Fork(check).wait().status == 0


def test_compressed_archives_are_refused_before_any_member_is_read(
    valid_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 KB unpack to 4 MB of instructions, which take a minute and a GB to read."""
    path = pickled("bomb.pt", b"](" + b"N" * 4_000_000 + b"e", zipfile.ZIP_DEFLATED)
    assert Path(path).stat().st_size < 5000
    with (
        zipfile.ZipFile(valid_checkpoint) as whole,
        zipfile.ZipFile("smaller.pt", "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in whole.namelist():
            archive.writestr(name, whole.read(name))
    check_checkpoint("smaller.pt", "checkpoint.load", trust=True)  # torch can read it
    assert torch.load("smaller.pt", weights_only=False)["state"]
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("read a member"))
    for name in ("bomb.pt", "smaller.pt"):
        with pytest.raises(ConfigError, match=rf"{name}: refused, compressed"):
            check_checkpoint(name, "checkpoint.load")
        with pytest.raises(pickle.UnpicklingError, match="compressed"):
            reading._read(name)  # from an object store, it is checked only when it is loaded


def test_the_checkpoint_of_a_long_run_is_read() -> None:
    """ThroughputMonitor records every batch."""
    batch = (1000, 2000, 3000, 4000, 5000, 0.1, 0.2, 0.3, True)
    torch.save({"state": [(*batch[:5], i / 7, *batch[6:]) for i in range(20_000)]}, "long.pt")
    assert len(reading._read("long.pt")["state"]) == 20_000


def test_a_file_in_torchs_older_format_is_damaged() -> None:
    torch.save({"state": {}}, "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedCheckpointError, match="not a zip file"):
        check_checkpoint("old.pt", "checkpoint.load")
    with pytest.raises(zipfile.BadZipFile):
        reading._read("old.pt")


@pytest.mark.parametrize("key", ["state", "model"])
def test_a_dict_whose_attributes_shadow_methods_is_refused_in_one_line(key: str, valid_checkpoint: Path) -> None:
    class Hiding(OrderedDict[str, Any]):
        def __reduce__(self) -> Any:
            return OrderedDict, (), {"items": 3, "keys": 3, "get": 3}, None, iter(dict.items(self))

    def by_attributes(checkpoint: dict[str, Any]) -> None:
        holder = checkpoint if key == "state" else checkpoint["state"]
        holder[key] = Hiding(holder[key])

    with pytest.raises(DamagedCheckpointError, match="'int' object is not callable"):
        check_checkpoint(str(poisoned(valid_checkpoint, by_attributes)), "checkpoint.load")


class FakeStore(ObjectStore):
    """Object store whose bucket is a local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get_object_size(self, object_name: str) -> int:
        return (self.folder / object_name).stat().st_size

    def download_object(self, object_name: str, filename: Any, *_: Any, **__: Any) -> None:
        shutil.copy(self.folder / object_name, filename)


@pytest.mark.parametrize("trust", [False, True])
def test_the_index_of_a_sharded_checkpoint_in_an_object_store_is_not_unpickled(trust: bool, tmp_path: Path) -> None:
    (tmp_path / "bucket" / "ep1").mkdir(parents=True)
    (tmp_path / "bucket" / "ep1" / ".metadata").write_bytes(pickle.dumps(Payload()))
    sharded: Any = SimpleNamespace(
        fsdp_sharded_state_dict_enabled=True, fsdp_config=object(), device_mesh=None, run_name="run"
    )
    with restricted_loading(trust=trust), pytest.raises(ConfigError) as error:
        composer_checkpoint.load_checkpoint("ep1", sharded, None, FakeStore(tmp_path / "bucket"))  # type: ignore[arg-type]
    assert MARKER.exists() is trust
    if not trust:
        assert "checkpoint.load: ep1: refused, sharded checkpoints are unpickled without checks" in str(error.value)


def test_checkpoints_in_an_object_store_are_checked_too(
    valid_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composer_trainer, "maybe_create_object_store_from_uri", lambda _: FakeStore(Path("bucket")))
    load = ["checkpoint.load=s3://bucket/run/one.pt", *BRIEF]
    Path("bucket/run").mkdir(parents=True)
    shutil.copy(valid_checkpoint, "bucket/run/one.pt")
    assert run(*load)["training"]["batches"] == 3
    shutil.copy(poisoned(valid_checkpoint, by_pickle), "bucket/run/one.pt")
    with pytest.raises(ConfigError, match=r"checkpoint\.load: run/one\.pt: refused, .*posix\.mkdir"):
        run(*load)
    assert not MARKER.exists()


def test_a_flipped_bit_is_detected_or_changes_no_weight(valid_checkpoint: Path) -> None:
    """torch verifies no checksums: training would continue with a flipped bit."""
    whole, path = valid_checkpoint.read_bytes(), Path("flipped.pt")
    expected = torch.load(valid_checkpoint, weights_only=False)["state"]["model"]
    generator = torch.Generator().manual_seed(0)
    damaged = 0
    for attempt in range(40):
        position = int(torch.randint(len(whole), (), generator=generator))
        if attempt % 4 == 0:
            path.write_bytes(whole[:position])
        else:
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << attempt % 8]) + whole[position + 1 :])
        try:
            check_checkpoint(str(path), "checkpoint.load")
        except DamagedCheckpointError:
            damaged += 1
        else:  # the byte is between the archive's members
            checkpoint = torch.load(path, weights_only=False)["state"]["model"]
            torch.testing.assert_close(checkpoint, expected, rtol=0, atol=0)
    assert damaged > 30
