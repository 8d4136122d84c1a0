"""``on_unavailable: warn`` after "did not take effect": what was applied stays in force, in training and evaluation.

Every technique trains with a ``verify`` that fails. Its weights and metrics equal those of the run in which it passes.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from composer import DataSpec, Evaluator
from composer.core import State
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader

from tests.helpers.common import Batch, Batches, awkward_batches, final_weights, make_trainer, plain_batches, tiny_bert
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.models import tiny_model
from tests.helpers.settings import Case, cases

KEPT = "had no effect, kept"


class Outcome:
    """A run of four batches that evaluates after the second and third one; its Trainer is closed."""

    def __init__(self, case: Case, *, fails: bool, gpu: bool, by_token: bool = False) -> None:
        techniques = case.build_all()
        self.technique = techniques[-1]
        self.failed = 0
        if fails:
            self.technique.on_unavailable = "warn"
            self.technique.verify = self._fail  # type: ignore[method-assign]
        trainer = make_trainer(
            techniques,
            model=HuggingFaceModel(
                tiny_model("bert", "tokens") if by_token else tiny_bert(),
                use_logits=True,
                eval_metrics=[LanguageCrossEntropy()],
            ),
            batches=[labelled(batch) for batch in plain_batches()] if by_token else None,
            eval_dataloader=evaluation(by_token),
            eval_interval="9ba",  # eval() alone
            gpu=gpu,
        )
        self.metrics: list[float] = []
        said = rf"continuing although {self.technique.name}: was applied but did not take effect: this test says so"
        with pytest.warns(UserWarning, match=said) if fails else contextlib.nullcontext():
            trainer.fit(duration="2ba")
        for _ in range(2):
            trainer.eval()
            self.metrics.append(float(trainer.state.eval_metric_values["LanguageCrossEntropy"]))
            trainer.fit(duration="1ba")
        self.weights = final_weights(trainer)
        trainer.close()

    def _fail(self, state: State) -> dict[str, Any]:
        self.failed += 1
        raise self.technique.not_engaged("this test says so", "nothing")


def labelled(batch: Batch, *, padding: bool = False) -> Batch:
    """Give each real token, or each token, a label."""
    labels = batch["input_ids"] % 2
    return {**batch, "labels": labels if padding else labels.masked_fill(batch["attention_mask"] == 0, -100)}


def evaluation(by_token: bool) -> Evaluator:
    batches = awkward_batches()
    if by_token:
        batches = [labelled(batch, padding=True) for batch in batches]
    loader = DataLoader(Batches(batches), batch_size=None)
    data = DataSpec(loader, get_num_samples_in_batch=lambda batch: len(batch["labels"]), split_batch=lambda b, n: [b])
    return Evaluator(label="eval", dataloader=data, metric_names=["LanguageCrossEntropy"])


@pytest.mark.parametrize("case", others_exhaustive(cases(), lambda case: case.name != "torch_compile"))  # it takes 6 s
def test_a_technique_without_effect_stays_in_force(case: Case) -> None:
    check(case, gpu=False)


@pytest.mark.parametrize("case", [c for c in cases() if c.id.startswith(("unpadding", "fused_layers"))])
def test_evaluation_reads_labels_on_padding(case: Case) -> None:
    check(case, gpu=False, by_token=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(gpu=True))
def test_a_technique_without_effect_stays_in_force_on_a_gpu(case: Case) -> None:
    check(case, gpu=True)


def check(case: Case, **settings: Any) -> None:
    engaged, kept = Outcome(case, fails=False, **settings), Outcome(case, fails=True, **settings)
    assert kept.failed == 1, "it is not verified again"
    assert (engaged.technique.engaged, kept.technique.engaged) == (True, False)
    assert kept.technique.evidence["applied"] == KEPT
    assert kept.technique.evidence["unavailable"].endswith("this test says so")
    tolerance: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5} if settings["gpu"] else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(kept.metrics, engaged.metrics, **tolerance)
    torch.testing.assert_close(kept.weights, engaged.weights, **tolerance)
    torch._dynamo.reset()
