"""The compile cache: reuse by later processes, the portable file, restored settings, and damaged or unsafe caches."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import ComposerModel
from torch import Tensor
from torch.nn import functional as F

from composer_speedups import TorchCompile
from composer_speedups.algorithms.torch_compile.cache import KEY, PORTABLE_FILE, CompileCache
from composer_speedups.core.errors import ConfigError, TechniqueError
from tests.algorithms.test_gradient_checkpointing import Plain
from tests.helpers.common import Batch, Recorder, make_trainer, plain_batches
from tests.helpers.forks import Fork
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.slow
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class Small(ComposerModel):
    """A small model whose blocks compile two kernels (BERT's have twelve): the tests do not depend on the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Plain()
        for block in self.model.blocks:
            block.dropout.p = 0.0

    def forward(self, batch: Batch) -> Tensor:
        return self.model(batch["input_ids"][:, :8] / 64)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs, batch["labels"])


def fit(*techniques: TorchCompile) -> list[float]:
    """Train three batches in a process without compiled code, and return the losses."""
    torch._dynamo.reset()
    losses = Recorder()
    trainer = make_trainer(techniques, model=Small(), batches=plain_batches(3), callbacks=[losses])
    trainer.fit()
    trainer.close()
    return losses.losses


def fit_compiled(cache: Path | str) -> tuple[list[float], dict[str, Any]]:
    """Train with torch_compile and return the losses and its evidence."""
    technique = TorchCompile(scope="blocks", dynamic=False, cache=str(cache))
    return fit(technique), technique.evidence


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, Any]]:
    """The cache folder that one run filled, the run's losses and its evidence."""
    folder = tmp_path_factory.mktemp("cold") / "made" / "here"
    torch.set_num_threads(1)  # the settings of every test; torch's cache keys include them
    torch.set_float32_matmul_precision("highest")
    return folder, *fit_compiled(folder)


def portable_only(cold: Any) -> Path:
    """Return a folder with only the portable file, as on another machine."""
    Path("portable_only").mkdir()
    shutil.copy(cold[0] / PORTABLE_FILE, "portable_only")
    return Path("portable_only")


@pytest.mark.pins
def test_a_first_run_writes_the_folder_and_the_portable_file(cold: Any) -> None:
    folder, losses, evidence = cold
    assert_near(torch.tensor(losses), torch.tensor(fit()), what="losses of inductor's kernels")
    assert evidence["cache_misses"] > 0
    assert evidence["cache_hits"] == evidence["cache_bypasses"] == 0
    assert evidence["cache_file"] == "written"
    assert (folder / PORTABLE_FILE).stat().st_size > 1000
    assert [*(folder / "inductor").rglob("*.so")], "the compiled code is in the folder"
    assert sorted(p.name for p in folder.iterdir()) == ["inductor", PORTABLE_FILE], "no temporary file is left"


@pytest.mark.pins
def test_a_second_run_compiles_nothing_and_trains_the_same(cold: Any) -> None:
    folder, losses, evidence = cold
    written = (folder / PORTABLE_FILE).stat().st_mtime_ns
    again, found = fit_compiled(folder)
    assert again == losses
    assert (found["cache_hits"], found["cache_misses"]) == (evidence["cache_misses"], 0)
    assert found["cache_file"] == "not needed"
    assert (folder / PORTABLE_FILE).stat().st_mtime_ns == written


@pytest.mark.pins
def test_the_portable_file_is_sufficient(cold: Any) -> None:
    again, found = fit_compiled(portable_only(cold))
    assert again == cold[1]
    assert (found["cache_hits"], found["cache_misses"]) == (cold[2]["cache_misses"], 0)
    assert found["cache_file"] == "loaded"


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def _of_another_torch(data: bytes) -> bytes:
    return data.replace(torch.__version__.encode(), b"1.13.0", 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_truncated, "it is damaged"),
        (_flipped, "it is damaged"),
        (lambda _: b"", "it is not a compile cache"),
        (lambda _: b"GIF89a\n{}", "it is not a compile cache"),
        (lambda data: data.split(b"\n")[0] + b"\nnot json\n", "Expecting value"),
        (_of_another_torch, r"it was written with torch 1\.13\.0, device cpu .*, and this is torch"),
    ],
)
def test_a_bad_file_costs_one_warning_and_is_replaced(cold: Any, change: Any, reason: str) -> None:
    folder = portable_only(cold)
    whole = (folder / PORTABLE_FILE).read_bytes()
    (folder / PORTABLE_FILE).write_bytes(change(whole))
    cache = CompileCache(folder, torch.device("cpu"))
    with pytest.warns(UserWarning, match=f"portable.bin is ignored, and everything is compiled: {reason}") as warned:
        cache.open()
    assert len(warned) == 1
    cache.save()
    cache.close()
    assert cache.file_state == "written"
    assert (folder / PORTABLE_FILE).read_bytes().startswith(whole.split(b"{")[0])
    shutil.rmtree(folder / "inductor")
    replaced = CompileCache(folder, torch.device("cpu"))
    replaced.open()
    replaced.close()
    assert replaced.file_state == "loaded"


def test_artifacts_that_torch_cannot_read_cost_one_warning(cold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = portable_only(cold)
    monkeypatch.setattr("torch.compiler.load_cache_artifacts", lambda _: None)
    cache = CompileCache(folder, torch.device("cpu"))
    with pytest.warns(UserWarning, match="torch cannot read its artifacts"):
        cache.open()
    cache.close()


def test_a_run_with_a_bad_file_trains(cold: Any) -> None:
    folder = portable_only(cold)
    (folder / PORTABLE_FILE).write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="it is not a compile cache"):
        losses, evidence = fit_compiled(folder)
    assert losses == cold[1]
    assert evidence["cache_misses"] == cold[2]["cache_misses"]
    assert evidence["cache_file"] == "written"


def test_a_file_that_cannot_be_written_leaves_the_old_one(cold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = portable_only(cold)
    (folder / PORTABLE_FILE).write_bytes(b"old")
    cache = CompileCache(folder, torch.device("cpu"))
    with pytest.warns(UserWarning, match="it is not a compile cache"):
        cache.open()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(UserWarning, match="was not written .No space left on device"):
        cache.save()
    cache.close()
    assert (folder / PORTABLE_FILE).read_bytes() == b"old"


@pytest.mark.pins
def test_flags_and_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with torch._inductor.config.patch(fx_graph_cache=False):
        technique = TorchCompile(cache="here")
        trainer = make_trainer([technique])
        for _ in range(2):
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(Path("here/inductor").absolute())
            assert torch._inductor.config.fx_graph_cache
            technique.close()
            assert [os.environ.get(name) for name in VARIABLES] == ["mine", None]
            assert not torch._inductor.config.fx_graph_cache
            technique._cache.open()
        trainer.close()
        assert not torch._inductor.config.fx_graph_cache
    assert [os.environ.get(name) for name in VARIABLES] == ["mine", None]


def test_resuming_does_not_depend_on_the_folder() -> None:
    assert repr(TorchCompile(cache="a")) == repr(TorchCompile(cache="b")) == repr(TorchCompile())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="cache='x' must be a folder for inductor's cache"):
        TorchCompile(backend="aot_eager", cache="x")
    with pytest.raises(ValueError, match="cache='' must be"):
        TorchCompile(cache="")
    Path("file").touch()
    with pytest.raises(TechniqueError, match=r"torch_compile: cache: .*/file is not a folder; choose a folder"):
        make_trainer([TorchCompile(cache="file/cache")])
    with pytest.raises(ConfigError, match=r"algorithms\.torch_compile\.cache: .* cannot be created"):
        CompileCache("file/cache", torch.device("cpu")).open()
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        pytest.raises(TechniqueError, match="inductor's caches are disabled; unset TORCHINDUCTOR_FORCE"),
    ):
        make_trainer([TorchCompile(cache="x")])


def test_a_folder_that_others_can_write_to_is_refused() -> None:
    Path("shared/cache/inductor").mkdir(parents=True)
    Path("link").symlink_to("shared/cache")
    Path("shared").chmod(0o777)  # anyone who can write to a parent can replace the folder
    for folder in ("shared/cache", "link", "shared/new"):
        with pytest.raises(ConfigError, match=f"{KEY}: others could put code into .*/shared is writable by others"):
            CompileCache(folder, torch.device("cpu")).open()
        with pytest.raises(TechniqueError, match=r"cache: others could put code.*only you can write to \(chmod 700\)"):
            make_trainer([TorchCompile(cache=folder)])
    assert "new" not in os.listdir("shared")
    Path("shared").chmod(0o755)
    cache = CompileCache("link", torch.device("cpu"))
    cache.open()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(Path("shared/cache/inductor").absolute()), "links are resolved"
    assert stat.S_IMODE(Path("shared/cache/inductor").stat().st_mode) == 0o700
    cache.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_file_of_another_user_is_not_read(cold: Any) -> None:
    folder = portable_only(cold)
    os.chown(folder / PORTABLE_FILE, 12345, 12345)
    cache = CompileCache(folder, torch.device("cpu"))
    with pytest.warns(UserWarning, match=r"others could have written it: .*portable.bin belongs to user 12345"):
        cache.open()
    cache.close()
    assert cache.file_state == "refused"


def test_inductors_default_folder_is_refused_if_others_can_write_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name under /tmp is predictable."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(Path.cwd()))
    make_trainer([TorchCompile(scope="blocks")]).close()
    [made] = Path().glob("torchinductor_*")
    made.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"{KEY}: others could put code into .*{made}.* writable by others"):
        make_trainer([TorchCompile(scope="blocks")])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")  # chosen by the user
    make_trainer([TorchCompile(scope="blocks")]).close()


def test_a_fresh_process_uses_the_code_that_another_compiled(cold: Any) -> None:
    """The process has compiled nothing and has a new inductor cache of its own, as in a benchmark."""
    folder = str(cold[0])

    def fit_again() -> None:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        Path("fitted.json").write_text(json.dumps(fit_compiled(folder)))

    done = Fork(fit_again, TORCHINDUCTOR_CACHE_DIR=str(Path("own").absolute())).wait(300)
    assert done.status == 0, done.stderr
    losses, evidence = json.loads(Path("fitted.json").read_text())
    assert losses == cold[1]
    assert (evidence["cache_hits"], evidence["cache_misses"]) == (cold[2]["cache_misses"], 0)
    assert not [*Path("own").rglob("*.so")]
