"""torch_compile's cache: later processes reuse the folder, settings are restored, and unsafe folders are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import ComposerModel
from torch import Tensor
from torch.nn import functional as F

from composer_speedups import TorchCompile
from composer_speedups.core.errors import Refusal
from tests.algorithms.test_gradient_checkpointing import Plain
from tests.helpers.common import Batch, Recorder, fit_and_close, make_trainer, plain_batches, trained
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
    trained(techniques, model=Small(), batches=plain_batches(3), callbacks=[losses])
    return losses.losses


def fit_compiled(cache: Path | str) -> tuple[list[float], dict[str, Any]]:
    """Train with torch_compile and return the losses and its evidence."""
    technique = TorchCompile(scope="blocks", dynamic=False, cache=str(cache))
    return fit(technique), technique.evidence


@pytest.mark.exhaustive
def test_a_fresh_process_uses_the_code_that_another_compiled() -> None:
    """Also from a copy of the folder, as on another machine."""
    losses, evidence = fit_compiled("made/here")
    assert_near(torch.tensor(losses), torch.tensor(fit()), what="losses of inductor's kernels")
    assert evidence["cache_misses"] > 0
    assert evidence["cache_hits"] == evidence["cache_bypasses"] == 0
    assert [*Path("made/here").rglob("*.so")], "the compiled code is in the folder"
    shutil.copytree("made/here", "copy")
    shutil.rmtree("made")

    def fit_again() -> None:
        torch.set_num_threads(1)  # torch's cache keys include these settings
        torch.set_float32_matmul_precision("highest")
        Path("fitted.json").write_text(json.dumps(fit_compiled("copy")))

    done = Fork(fit_again, TORCHINDUCTOR_CACHE_DIR=str(Path("own").absolute())).wait()
    assert done.status == 0, done.stderr
    losses_again, evidence_again = json.loads(Path("fitted.json").read_text())
    assert losses_again == losses
    assert (evidence_again["cache_hits"], evidence_again["cache_misses"]) == (evidence["cache_misses"], 0)
    assert not [*Path("own").rglob("*.so")]


@pytest.mark.exhaustive
@pytest.mark.pins
def test_the_folder_is_in_use_only_while_the_run_trains_or_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    def used(*_: Any) -> dict[str, Any]:
        os.environ["TRITON_CACHE_DIR"] = "set by inductor"
        seen.append([os.environ.get(name) for name in VARIABLES])
        return {}

    technique = TorchCompile(cache="here")
    seen: list[Any] = []
    monkeypatch.setattr(TorchCompile, "proof", used)
    trainer = make_trainer([technique], model=Small(), batches=plain_batches(1))
    assert [os.environ.get(name) for name in VARIABLES] == ["mine", None]
    fit_and_close(trainer)
    assert seen[0] == [str(Path("here").absolute()), "set by inductor"]
    assert [os.environ.get(name) for name in VARIABLES] == ["mine", None]


def test_resuming_does_not_depend_on_the_folder() -> None:
    assert repr(TorchCompile(cache="a")) == repr(TorchCompile(cache="b")) == repr(TorchCompile())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cache must be a folder for inductor's cache, .*, not 'x'"):
        TorchCompile(backend="aot_eager", cache="x")
    Path("file").touch()
    with pytest.raises(Refusal, match=r"torch_compile: cache: .*/file is not a folder; choose a folder"):
        make_trainer([TorchCompile(cache="file/cache")])
    for flag in ({"force_disable_caches": True}, {"fx_graph_cache": False}):
        with (
            torch._inductor.config.patch(flag),
            pytest.raises(Refusal, match="inductor's caches are disabled; unset TORCHINDUCTOR_FORCE"),
        ):
            make_trainer([TorchCompile(cache="x")])


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_that_others_can_write_to_is_refused(link: bool) -> None:
    Path("cache").mkdir(mode=0o700)
    Path("cache").chmod(0o777)
    Path("link").symlink_to("cache")
    technique = TorchCompile(cache="link" if link else "cache")
    with pytest.raises(Refusal, match=r"cache: others could put code into .*; choose a folder"):
        make_trainer([technique])
    Path("cache").chmod(0o755)
    make_trainer([technique]).close()
    if os.geteuid() == 0:
        os.chown("cache", 12345, 12345)
        with pytest.raises(Refusal, match="cache: others could put code into"):
            make_trainer([technique])


def test_inductors_default_folder_is_refused_if_others_can_write_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name under /tmp is predictable."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(Path.cwd()))
    make_trainer([TorchCompile(scope="blocks")]).close()
    [made] = Path().glob("torchinductor_*")
    made.chmod(0o777)
    with pytest.raises(Refusal, match=rf"cache: others could put code into .*{made}"):
        make_trainer([TorchCompile(scope="blocks")])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")  # chosen by the user
    make_trainer([TorchCompile(scope="blocks")]).close()
