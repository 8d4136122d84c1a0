"""Checkpoints and models of others: nothing that they hold is executed, unless the user says that it is trusted."""

from __future__ import annotations

import contextlib
import json
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.utils import checkpoint as composer_checkpoint

from composer_speedups import runs
from composer_speedups.checkpoints.reading import DamagedCheckpointError, check_checkpoint, check_recorded
from composer_speedups.errors import ConfigError
from tests.jobs import run
from tests.payload import MARKER, Payload

Attack = Callable[[dict[str, Any]], None]


def by_pickle(checkpoint: dict[str, Any]) -> None:
    checkpoint["state"]["run_name"] = Payload()


def by_expression(checkpoint: dict[str, Any]) -> None:
    """Composer evaluates ``algorithms.<repr>``."""
    expression = f"Alibi.__init__.__globals__['__builtins__']['__import__']('os').mkdir({str(MARKER)!r})"
    checkpoint["state"]["algorithms"].append(("Alibi", {"repr": expression}))


def by_argument(checkpoint: dict[str, Any]) -> None:
    """A call of the right name, with an expression inside."""
    expression = f"Alibi(max_sequence_length=__import__('os').mkdir({str(MARKER)!r}))"
    checkpoint["state"]["algorithms"].append(("Alibi", {"repr": expression}))


attacks = pytest.mark.parametrize("attack", [by_pickle, by_expression, by_argument])


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a short run."""
    folder = tmp_path_factory.mktemp("honest")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("trainer.max_duration=2ba", "trainer.eval_batches=1", "checkpoint.interval=2ba", "export=false")
    return folder / "runs" / "quickstart" / "checkpoints" / "ep0-ba2-rank0.pt"


def poisoned(honest: Path, attack: Attack) -> Path:
    checkpoint = torch.load(honest, weights_only=False)
    attack(checkpoint)
    torch.save(checkpoint, "poisoned.pt")
    return Path("poisoned.pt")


@attacks
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.pins
def test_an_attack_is_refused_before_anything_is_touched(attack: Attack, weights_only: bool, honest: Path) -> None:
    path = poisoned(honest, attack)
    Path("runs/quickstart").mkdir(parents=True)
    named = "posix.mkdir" if attack is by_pickle else "Alibi"
    with pytest.raises(
        ConfigError, match=rf"checkpoint\.load: poisoned\.pt: refused, .*{named}.*trust_checkpoint=true"
    ):
        run(f"checkpoint.load={path}", f"checkpoint.weights_only={json.dumps(weights_only)}")
    assert not MARKER.exists()
    assert sorted(Path("runs").rglob("*")) == [Path("runs/.quickstart.lock"), Path("runs/quickstart")]


@attacks
@pytest.mark.pins
def test_a_file_that_changes_after_it_was_looked_at_gains_nothing(
    attack: Attack, honest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "check_checkpoint", lambda *_: None)
    with pytest.raises(ConfigError, match=r"checkpoint\.load: refused, "):
        run(f"checkpoint.load={poisoned(honest, attack)}")
    assert not MARKER.exists()


@attacks
def test_the_attacks_are_real_where_the_user_trusts_the_file(attack: Attack, honest: Path) -> None:
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # whatever comes of it
        warnings.simplefilter("ignore")
        run(f"checkpoint.load={poisoned(honest, attack)}", "checkpoint.trust_checkpoint=true")
    assert MARKER.exists()


def test_autoresume_looks_too(honest: Path) -> None:
    settings = ["checkpoint.interval=2ba", "run_name=mine", "trainer.max_duration=4ba", "trainer.eval_batches=1"]
    run(*settings)
    folder = Path("runs/mine/checkpoints")
    Path("runs/mine/report.json").unlink()
    shutil.copy(poisoned(honest, by_pickle), folder / "ep0-ba5-rank0.pt")
    with pytest.raises(ConfigError, match=r"checkpoint\.autoresume: .*ba5-rank0\.pt: refused, .*posix\.mkdir"):
        run(*settings)
    assert not MARKER.exists()


def test_folders_and_archives_are_refused(honest: Path) -> None:
    Path("sharded").mkdir()
    with pytest.raises(ConfigError, match="sharded is a folder; sharded checkpoints are unpickled"):
        run("checkpoint.load=sharded")
    for name in ("file.tar", "file.pt.gz"):  # a zip file by its end, and by its name something that Composer unpacks
        shutil.copy(honest, name)
        with pytest.raises(ConfigError, match=f"{name} is an archive"):
            run(f"checkpoint.load={name}")
    with tarfile.open("real.tar", "w") as tar:
        tar.add(honest, "composer_states.pt")
    with pytest.raises(ConfigError, match=r"real\.tar is an archive"):  # with a zip file's end near its own
        run("checkpoint.load=real.tar")
    with pytest.raises(ConfigError, match="is an archive"):
        check_checkpoint("s3://bucket/file.tar.gz", "checkpoint.load")


@pytest.mark.parametrize(
    ("name", "spelled", "fine"),
    [
        ("FusedOptimizer", "FusedOptimizer()", True),
        ("LoRA", "LoRA(rank=8, targets=['query'], alpha=1.5, x=None)", True),
        ("GradientClipping", "<composer.algorithms.gradient_clipping.GradientClipping object at 0x7f6ea48f5110>", True),
        ("Alibi", "Alibi(max_sequence_length=64)", True),
        ("Alibi", "BlurPool()", False),
        ("Alibi", "Alibi", False),
        ("Alibi", "Alibi(**{'a': open})", False),
        ("Alibi", "Alibi(open('x', 'w'))", False),
        ("Alibi", "Alibi().__class__", False),
        ("Alibi", "(" * 5000, False),
        ("Alibi", 3, False),
        ("os", "os()", False),
        ("__builtins__", "__builtins__()", False),
        ("import_module('os')", "x()", False),
        (b"Alibi", "Alibi()", False),
    ],
)
def test_recorded_algorithms_are_known_names_with_plain_values(name: Any, spelled: Any, fine: bool) -> None:
    checkpoint = {"state": {"algorithms": [(name, {"repr": spelled})]}}
    if fine:
        return check_recorded(checkpoint)
    with pytest.raises(ConfigError, match="refused, it records"):
        check_recorded(checkpoint)
    return None


def test_a_checkpoint_with_any_byte_changed_is_damaged_or_the_same(honest: Path) -> None:
    """torch looks at no checksum: a flipped bit of a weight would train on."""
    whole, path = honest.read_bytes(), Path("flipped.pt")
    expected = torch.load(honest, weights_only=False)["state"]["model"]
    generator = torch.Generator().manual_seed(0)
    damaged = 0
    for attempt in range(40):
        place = int(torch.randint(len(whole), (), generator=generator))
        if attempt % 4 == 0:
            path.write_bytes(whole[:place])
        else:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << attempt % 8]) + whole[place + 1 :])
        try:
            check_checkpoint(str(path), "checkpoint.load")
        except DamagedCheckpointError:
            damaged += 1
        else:  # between the archive's members
            held = torch.load(path, weights_only=False)["state"]["model"]
            torch.testing.assert_close(held, expected, rtol=0, atol=0)
    assert damaged > 30


def test_composer_itself_still_needs_all_this(honest: Path) -> None:
    """If it no longer does, reading.py can go."""
    path = poisoned(honest, by_pickle)
    composer_checkpoint.safe_torch_load(str(path))
    assert MARKER.exists()
