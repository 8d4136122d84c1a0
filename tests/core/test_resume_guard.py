"""Resuming with techniques that differ from the checkpoint's is an error that names both lists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from composer_speedups import EngagementReport, ForEachOptimizer, FusedLayers, FusedOptimizer, SDPAAttention, Unpadding
from composer_speedups.core.errors import ConfigError
from tests.helpers.common import SAVING, final_weights, make_trainer, trained

# Composer's warning, just before our error
pytestmark = pytest.mark.filterwarnings("ignore:.* is not in the state_dict")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """Return the checkpoint of a run with the fused optimizer and SDPA."""
    trained([FusedOptimizer(), SDPAAttention()], callbacks=[EngagementReport()], save_folder=str(tmp_path), **SAVING)
    return str(tmp_path / "ba2.pt")


@pytest.mark.pins
def test_the_error_for_other_techniques_names_both_lists(checkpoint: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer([ForEachOptimizer(), SDPAAttention()], load_path=checkpoint)
    message = str(error.value)
    assert "[FusedOptimizer(kernel='torch'), SDPAAttention(backend='auto')]" in message
    assert "[ForEachOptimizer(), SDPAAttention(backend='auto')]" in message


def test_replacing_all_techniques_is_refused_with_both_lists(tmp_path: Path) -> None:
    """Composer does not pass the checkpoint's algorithms to a technique that is not among them."""
    written = [Unpadding(), FusedLayers(), FusedOptimizer()]
    trained(written, save_folder=str(tmp_path), **SAVING)
    with pytest.raises(ConfigError) as error:
        make_trainer([SDPAAttention()], load_path=str(tmp_path / "ba2.pt"))
    before = ", ".join(sorted(map(repr, written)))
    assert f"written with techniques [{before}] and this run has [SDPAAttention(backend='auto')]" in str(error.value)


def test_fewer_techniques_are_refused(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"this run has \[FusedOptimizer\(kernel='torch'\)\]"):
        make_trainer([FusedOptimizer()], load_path=checkpoint)


def test_resuming_without_techniques_is_refused_if_there_is_an_engagement_report(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"this run has \[\]"):
        make_trainer([], callbacks=[EngagementReport()], load_path=checkpoint)


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


def test_nothing_is_checked_without_techniques_and_engagement_report(checkpoint: str) -> None:
    """Without a technique or an EngagementReport, Composer does not call this package, and does not warn either.

    train.py always adds the report; add it to your own Trainer for this check.
    """
    trainer = make_trainer([], load_path=checkpoint)
    assert trainer.state.timestamp.batch.value == 2
    assert trainer.state.algorithms == []
    trainer.close()


def test_one_common_technique_is_enough_to_detect_removed_and_changed_ones(checkpoint: str) -> None:
    for techniques in ([SDPAAttention()], [FusedOptimizer(), SDPAAttention("math")]):
        with pytest.raises(
            ConfigError, match=r"written with techniques \[FusedOptimizer\(kernel='torch'\), SDPAAttention"
        ):
            make_trainer(techniques, load_path=checkpoint)
