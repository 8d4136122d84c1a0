"""torch.nn.DataParallel, HF Trainer's default with several GPUs in one process: replicas in threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composer_speedups import apply_fused_layers, apply_unpadding
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import batch
from tests.helpers.models import FUSED, UNPADDED, Family, fit_batches, tiny_model
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning"),  # each replica's loss
]


@pytest.mark.parametrize("labels", ["ignored", "on padding"])
@pytest.mark.parametrize("family", UNPADDED)
def test_replicas_train_like_the_untouched_model(family: Family, labels: str) -> None:
    reference, model = tiny_model(family, "tokens").cuda(), tiny_model(family, "tokens").cuda()
    apply_unpadding(model, 8)
    if family in FUSED:
        apply_fused_layers(model)
    (inputs,) = fit_batches(reference, [batch([5, 12, 9, 3, 12, 2])])
    inputs["labels"] = inputs["input_ids"] % 2
    if labels == "ignored":
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    inputs = {name: values.cuda() for name, values in inputs.items()}
    replicated = nn.DataParallel(model, device_ids=[0, 1])
    torch.set_float32_matmul_precision("highest")
    for _ in range(2):
        found = []
        for each, module in ((model, replicated), (nn.DataParallel(reference), None)):
            each.zero_grad()
            called = each if module is None else module
            loss = called(**inputs).loss.sum()
            loss.backward()
            found.append([loss.detach(), *gradients(model if module is not None else reference).values()])
        assert_near(found[0], found[1])
    assert len(unpadded_encoders(model)) == 1
