"""Unpadding on a GPU: the flash kernel runs, its results are accurate, and a step never synchronizes with the GPU."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger

from composer_speedups import Unpadding
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.algorithms.unpadding.evidence import BIASED, DISENTANGLED, FLASH, operators_among
from composer_speedups.core.compile_counts import OperatorRecorder
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import batch, make_trainer, tiny_bert
from tests.helpers.masks import masked_batch, random_masks
from tests.helpers.models import HEADS, UNPADDED, tiny_model
from tests.helpers.waiting import check_planned_steps
from tests.reference.loop import gradients
from tests.reference.nearness import distance, values

# torch warns once per process that its debug mode may miss synchronizations.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")]


OWN_KERNELS = {"mpnet": BIASED, "t5": BIASED, "deberta_v2": DISENTANGLED}  # the flash kernel has no relative positions


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
        recorder = OperatorRecorder()
        with recorder:
            unpadded_bf16.append(values(unpadded, inputs, torch.bfloat16))
        if unpadded_encoders(unpadded)[0].ran == "unpadded":
            if family in OWN_KERNELS:
                own = OWN_KERNELS[family]
                assert operators_among(recorder.counts) == [own, f"{own}_backward"]
                assert recorder.counts[own] == 2
            else:
                assert operators_among(recorder.counts) == [FLASH.strip("_")]
                assert recorder.counts[FLASH] == 2
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


def test_a_planned_step_never_synchronizes_with_the_gpu() -> None:
    model: Any = tiny_bert(dropout=0.1)
    unpad(model.cuda().train())
    check_planned_steps(model)
    assert unpadded_encoders(model)[0].ran == "unpadded"


class NoWaiting(Algorithm):
    """Raise on GPU synchronization during the forward and backward pass, from the second batch on.

    Loading a batch is left out, because Composer itself reads back the number of samples between that and the forward.
    """

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.BEFORE_FORWARD, Event.AFTER_BACKWARD)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        steady = event == Event.BEFORE_FORWARD and state.timestamp.batch.value > 0
        torch.cuda.set_sync_debug_mode("error" if steady else "default")


def test_a_steady_training_step_never_synchronizes_with_the_gpu() -> None:
    model = tiny_bert(dropout=0.1)
    model.config.problem_type = "single_label_classification"
    technique = Unpadding()
    trainer = make_trainer([NoWaiting(), technique], model=model, gpu=True, precision="amp_bf16")
    try:
        trainer.fit()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.close()
    assert technique.evidence["attention"] == "flash_attention_forward"
