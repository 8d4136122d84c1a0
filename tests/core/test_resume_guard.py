"""Resuming with techniques that differ from the checkpoint's is an error that names both lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer_speedups import ForEachOptimizer, FusedLayers, FusedOptimizer, SDPAAttention, Unpadding
from composer_speedups.core.errors import ConfigError
from tests.helpers.common import SAVING, final_weights, make_trainer, trained

# Composer's warning, just before our error
pytestmark = pytest.mark.filterwarnings("ignore:.* is not in the state_dict")


BOTH = "FusedOptimizer(), SDPAAttention(backend='auto')"  # the techniques of the checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the checkpoint of a run with the fused optimizer and SDPA."""
    folder = str(tmp_path_factory.mktemp("run"))
    trained([FusedOptimizer(), SDPAAttention()], save_folder=folder, **SAVING)
    return f"{folder}/ba2.pt"


@pytest.mark.parametrize(
    ("techniques", "current"),
    [
        ([ForEachOptimizer, SDPAAttention], "ForEachOptimizer(), SDPAAttention(backend='auto')"),
        ([FusedOptimizer, lambda: SDPAAttention("math")], "FusedOptimizer(), SDPAAttention(backend='ma"),
        ([FusedOptimizer], "FusedOptimizer()]"),
        ([SDPAAttention], "SDPAAttention(backend='auto')]"),
        # Composer does not pass the checkpoint's algorithms to techniques that are not among them.
        ([Unpadding, FusedLayers], "FusedLayers("),
    ],
    ids=["another", "other settings", "fewer", "one in common", "all replaced"],
)
@pytest.mark.pins
def test_the_error_for_other_techniques_names_both_lists(techniques: list[Any], current: str, checkpoint: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer([build() for build in techniques], load_path=checkpoint)
    assert f"was written with techniques [{BOTH}] and this run has [{current}" in str(error.value)


def test_techniques_on_a_plain_checkpoint_are_refused(tmp_path: Path) -> None:
    trained(save_folder=str(tmp_path), **SAVING)
    with pytest.raises(ConfigError, match=r"written with techniques \[\] and this run has \[FusedOptimizer"):
        make_trainer([FusedOptimizer()], load_path=str(tmp_path / "ba2.pt"))


def test_weights_only_loads_with_any_techniques(checkpoint: str) -> None:
    trainer = make_trainer([ForEachOptimizer()], load_path=checkpoint, load_weights_only=True)
    saved = torch.load(checkpoint, weights_only=False)["state"]["model"]
    loaded = final_weights(trainer)
    torch.testing.assert_close(loaded, {n: saved[n] for n in loaded}, rtol=0, atol=0)
    trainer.fit()
    trainer.close()
