"""The state of bnb_optimizer and lowbit_optimizer: its bits, and errors if it does not have the requested ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from composer_speedups import BnbOptimizer, LowBitOptimizer
from composer_speedups.core.errors import NotEngagedError
from composer_speedups.core.optimizer_evidence import state_bits
from tests.helpers.common import assert_not_engaged, make_trainer, trained


class Kind(NamedTuple):
    """A technique, and what its state consists of."""

    technique: type[Any]
    bits: Any
    size_setting: str
    forget_embeddings: Callable[[Any], Any]  # make the optimizer treat embeddings as any other parameter
    width: int = 8
    least_saved: float = 0.7  # share of the quantised values' bytes that remains without scales and look-up tables

    def build(self, **settings: Any) -> Any:
        """Build it for tiny_bert, whose matrices have 1024 and 2048 values."""
        return self.technique(self.bits, **{self.size_setting: 1024}, **settings)


def reset_full_precision(optimizer: Any) -> None:
    optimizer.full_precision = frozenset()


KINDS = {
    "bnb": Kind(BnbOptimizer, 8, "min_8bit_size", lambda optimizer: optimizer.mng.initialize(), least_saved=5.5 / 6),
    "8": Kind(LowBitOptimizer, 8, "min_size", reset_full_precision),
    "4": Kind(LowBitOptimizer, 4, "min_size", reset_full_precision, width=4),
    "fp8": Kind(LowBitOptimizer, "fp8", "min_size", reset_full_precision),
}
every_kind = pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in KINDS.items()])


@every_kind
def test_state_is_quantised_except_for_embeddings_and_small_tensors(kind: Kind) -> None:
    technique = kind.build()
    trainer = trained([technique])
    optimizer = trainer.state.optimizers[0]
    model: Any = trainer.state.model.model
    matrices = {n: p for n, p in model.named_parameters() if "embeddings" not in n and p.numel() >= 1024}
    for name, parameter in model.named_parameters():
        assert state_bits(optimizer, parameter) == (kind.width if name in matrices else 32), name
    values, evidence = sum(p.numel() for p in matrices.values()), technique.evidence
    assert evidence["values_by_state_bits"][str(kind.width)] == values
    assert evidence["embedding_state_bits"] == [32]
    at_most = values * (8 - kind.width / 4)  # of two moments, before scales and look-up tables
    saved = 8 * sum(p.numel() for p in model.parameters()) - evidence["state_bytes"]
    assert kind.least_saved * at_most < saved < at_most


@every_kind
def test_embeddings_are_quantised_if_requested(kind: Kind) -> None:
    technique = kind.build(embeddings_32bit=False)
    trained([technique])
    assert technique.evidence["embedding_state_bits"] == [kind.width, 32]  # the table of two token types is too small


@every_kind
def test_embeddings_that_lost_their_float32_state_are_detected(kind: Kind) -> None:
    trainer = make_trainer([kind.build()])
    kind.forget_embeddings(trainer.state.optimizers[0])
    assert_not_engaged(trainer, f"embeddings have {kind.width}-bit state")


@pytest.mark.parametrize("kind", [KINDS["bnb"], KINDS["8"]], ids=["bnb", "8"])
def test_a_model_too_small_for_it_is_detected(kind: Kind) -> None:
    said = rf"no parameter has 8-bit state; lower {kind.size_setting} \(4096 now\)"
    with pytest.raises(NotEngagedError, match=said):
        trained([kind.technique(kind.bits)])
