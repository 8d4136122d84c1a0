"""Unpadding on a GPU: the flash kernel runs, its results are accurate, and a step never synchronizes with the GPU."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.kernels.common import counting
from tests.families.test_family_techniques import Operators
from tests.helpers.common import batch
from tests.helpers.masks import masked_batch, random_masks
from tests.helpers.models import HEADS, UNPADDED, tiny_model
from tests.helpers.unpadded import way
from tests.reference.loop import gradients
from tests.reference.nearness import distance, values

# torch warns once per process that its debug mode may miss synchronizations.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")]


# the flash kernel has no relative positions
OWN_KERNELS = {"mpnet": "biased_attention", "t5": "biased_attention", "deberta_v2": "disentangled_attention"}


@pytest.mark.parametrize(("family", "head"), [*product(UNPADDED, HEADS), ("t5", "tokens")])
def test_errors_of_the_flash_kernel_are_close_to_the_padded_models(family: str, head: str) -> None:
    """Over random masks, the bf16 error of logits and gradients is at most 1.5 times the padded model's."""
    padded = tiny_model(family, head).cuda()
    unpadded = copy.deepcopy(padded)
    unpad(unpadded)
    exact, padded_bf16, unpadded_bf16 = [], [], []
    flash = 0
    for seed, mask in enumerate(random_masks(60, widest=64)):
        inputs = {k: v.cuda() for k, v in masked_batch(mask, head, seed=seed).items()}
        exact.append(values(padded, inputs, None))
        padded_bf16.append(values(padded, inputs, torch.bfloat16))
        with Operators() as operators, counting() as ran:
            unpadded_bf16.append(values(unpadded, inputs, torch.bfloat16))
        if way(ran) == "packed":
            own = OWN_KERNELS.get(family)
            assert (operators.counts["_flash_attention_forward"] if own is None else ran[own]) == 2
            flash += 1
    assert flash >= 20
    for i, what in enumerate(["logits", "gradients"]):
        reference = torch.cat([each[i] for each in exact])
        ours = distance(torch.cat([each[i] for each in unpadded_bf16]), reference)
        theirs = distance(torch.cat([each[i] for each in padded_bf16]), reference)
        assert 0 < ours <= 1.5 * theirs, what


def test_the_flash_kernel_applies_dropout_in_training() -> None:
    model = tiny_model("bert", attention_dropout=0.5).cuda().train()
    unpad(model)
    inputs = {k: v.cuda() for k, v in batch([6, 9, 12]).items()}
    with torch.autocast("cuda", torch.bfloat16):
        assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
        model.eval()
        assert torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_an_all_padding_batch_gives_no_nan_on_the_flash_kernel() -> None:
    model = tiny_model("bert", "mlm").cuda()
    unpad(model)
    inputs = {k: v.cuda() for k, v in masked_batch(torch.zeros(3, 5, dtype=torch.long), "mlm").items()}
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(**inputs).logits
    logits.float().sum().backward()
    assert logits.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(model).values())
