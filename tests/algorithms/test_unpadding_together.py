"""Unpadding with gradient checkpointing, torch_compile, DDP and FSDP, and in evaluation and prediction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.core import DataSpec
from torch.utils.data import DataLoader

from composer_speedups import Unpadding, apply_gradient_checkpointing, apply_torch_compile
from composer_speedups.algorithms.gradient_checkpointing.recompute import recomputations
from composer_speedups.core.compile_counts import compile_counts
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import Batches, batch, make_trainer, plain_batches, tiny_bert
from tests.helpers.exhaustive import SCOPES, family_params
from tests.helpers.models import UNPADDED, Family
from tests.helpers.unpadded import pair, values
from tests.reference.loop import counted
from tests.reference.tolerance import assert_near


def pair_in_training(family: Family = "bert", layers: int = 2) -> tuple[Any, Any]:
    reference, model, _ = pair(family, layers=layers)
    for network in (reference, model):
        network.config.problem_type = "single_label_classification"
    return reference.train(), model.train()


@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_recomputed_blocks_run_on_packed_tokens(family: Family) -> None:
    reference, model = pair_in_training(family)
    blocks = apply_gradient_checkpointing(model)
    inputs = batch([3, 9, 16, 1, 8])
    assert_near(values(model, inputs), values(reference, inputs))
    times = [recomputations(model.get_submodule(name)) for name in blocks]
    assert times == ([2] if family == "albert" else [1, 1]), "ALBERT runs its only block twice"
    assert unpadded_encoders(model)[0].ran == "unpadded"


@pytest.mark.parametrize("scope", SCOPES)
def test_after_the_first_batches_nothing_is_recompiled(scope: Any) -> None:
    """Five more batches have other numbers of tokens, rows and slots."""
    reference, model = pair_in_training(layers=1)
    if scope == "blocks":
        apply_gradient_checkpointing(model)
    apply_torch_compile(model, scope, backend="eager")
    lengths = torch.randint(1, 25, (8, 9), generator=torch.Generator().manual_seed(2)).tolist()
    batches = [batch(rows[: 3 + i % 7], seed=i) for i, rows in enumerate(lengths)]
    assert len({int(inputs["attention_mask"].sum()) // 8 for inputs in batches[3:]}) >= 4
    warm = compile_counts()
    for i, inputs in enumerate(batches):
        if i == 3:
            warm = compile_counts()
        counted(model, inputs["attention_mask"])
        assert_near(values(model, inputs), values(reference, inputs), what=f"batch {i}")
    assert warm.graphs
    assert compile_counts().since(warm)[:4] == (0, 0, 0, 0)


def test_predictions_match_the_untouched_model() -> None:
    model, batches = tiny_bert(), [*plain_batches(2), batch([1, 16, 5])]
    expected = [model.eval()(**inputs).logits.detach() for inputs in batches]
    trainer = make_trainer([Unpadding(8)], model=copy.deepcopy(model))
    loader = DataSpec(
        DataLoader(Batches(batches), batch_size=None), get_num_samples_in_batch=lambda b: len(b["labels"])
    )
    predicted = trainer.predict(loader)
    assert_near([output["logits"] for output in predicted], expected)
    (encoder,) = unpadded_encoders(trainer.state.model)
    assert encoder.ran == "unpadded"
    assert encoder.packing.planned == ()
    trainer.close()
