"""The first batch runs with and without packing: a model that reads padding is refused, in a Trainer and elsewhere."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer.core import DataSpec, Evaluator
from composer.models import ComposerModel, HuggingFaceModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from composer_speedups import FusedLayers, SDPAAttention, Unpadding, apply_recommended
from composer_speedups.algorithms.unpadding import encoder_swap
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core import first_comparison
from composer_speedups.core.errors import Refusal
from composer_speedups.core.stock import changes_to
from composer_speedups.packing.comparison import FLOAT32, Outcome, compare, outcome_of, with_padding
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.untouched import is_untouched
from tests.helpers.common import (
    Batch,
    Batches,
    Recorder,
    batch,
    data_spec,
    final_weights,
    fit_and_close,
    make_trainer,
    tiny_bert,
    trained,
)
from tests.helpers.models import tiny_model
from tests.reference.tolerance import assert_near

INPUTS = batch([9, 16, 3, 12])
DIFFERS = "its result differs from the untouched model's"


class Pooling(nn.Module):
    """An encoder with a custom head; ``pool`` is called with the last hidden state and the mask."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.bert, self.pool = tiny_bert().bert, pool
        torch.manual_seed(2)
        self.out = nn.Linear(32, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = self.out(self.pool(self.bert(input_ids, attention_mask).last_hidden_state, attention_mask))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def plain_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.mean(1)


def gradient_only(hidden: Tensor, mask: Tensor) -> Tensor:
    """Padding changes the gradients but not the outputs."""
    every_slot = hidden.pow(2).mean(1)
    return masked_mean(hidden, mask) + every_slot - every_slot.detach()


def value_only(hidden: Tensor, mask: Tensor) -> Tensor:
    """Padding changes the outputs, but no gradient flows there, as in the targets of SimSiam."""
    return masked_mean(hidden, mask) + plain_mean(hidden, mask).detach()


class CustomModel(ComposerModel):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        return self.model(**batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return outputs["loss"]


FIRST_WITHOUT_PADDING = [batch([16, 16]), batch([16, 3])]


@pytest.mark.parametrize(
    ("build", "batches", "message"),
    [
        (lambda: Pooling(plain_mean), [INPUTS], "the loss is .* instead of "),
        (lambda: Pooling(gradient_only), [INPUTS], r"the gradient of \S+ differs by [\d.]+% on the first batch"),
        (lambda: Pooling(value_only), [INPUTS], "the loss is .* instead of "),
        (lambda: Pooling(plain_mean), FIRST_WITHOUT_PADDING, "the loss is .* instead of "),
    ],
    ids=["mean", "gradient only", "value only", "no padding in the first batch"],
)
def test_a_head_that_reads_padding_is_refused(build: Callable[[], Any], batches: list[Batch], message: str) -> None:
    trainer = make_trainer([Unpadding(8)], model=CustomModel(build()), batches=batches)
    before = copy.deepcopy(trainer.state.model.state_dict())
    with pytest.raises(Refusal, match=rf"unpadding: {DIFFERS}: {message}.*check: never"):
        trainer.fit()
    torch.testing.assert_close(trainer.state.model.state_dict(), before, rtol=0, atol=0)
    trainer.close()
    assert not unpadded_encoders(trainer.state.model)


def test_half_of_the_first_row_is_masked_if_a_batch_has_no_padding() -> None:
    given = {"input_ids": torch.ones(3, 7, dtype=torch.long), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    padded = with_padding(given)["attention_mask"]
    assert padded.tolist() == [[1] * 4 + [0] * 3, [1] * 7, [1] * 7]
    assert given["attention_mask"].all()


def test_compare_counts_the_parameters_that_lose_their_gradient() -> None:
    gradients = {"a": torch.ones(2), "b": torch.ones(2)}
    untouched, changed = Outcome(1.0, None, gradients), Outcome(1.0, None, {"b": torch.ones(2)})
    assert compare(untouched, changed, FLOAT32).beyond == "1 of 2 parameters get no gradient, a among them"


class LossPerRow(Pooling):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = super().forward(input_ids, attention_mask, labels)["logits"]
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="none"), "logits": logits}


def test_a_loss_per_row_is_left_out_and_the_gradients_are_those_of_the_outputs() -> None:
    one, other = (outcome_of(LossPerRow(pool), INPUTS) for pool in (masked_mean, plain_mean))
    assert one.gradients["out.weight"].any()
    assert "the gradient of" in str(compare(one, other, FLOAT32).beyond)


def test_all_tensors_of_an_output_are_compared_unless_it_has_logits() -> None:
    class Outputs(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, named: bool) -> dict[str, Tensor]:
            hidden = input_ids.unsqueeze(-1).float()
            return {"logits" if named else "pooled": torch.ones(4, 2), "hidden": hidden, "of all": torch.ones(1, 3)}

    inputs = {name: INPUTS[name] for name in ("input_ids", "attention_mask")}
    both, logits = (outcome_of(Outputs(), {**inputs, "named": named}).outputs for named in (False, True))
    real = INPUTS["input_ids"][INPUTS["attention_mask"].bool()].float()
    torch.testing.assert_close((both, logits), (torch.cat([torch.ones(8), real, torch.ones(3)]), torch.ones(8)))


def test_a_head_that_reads_only_real_tokens_matches_the_untouched_model() -> None:
    trained([Unpadding(8)], model=CustomModel(Pooling(masked_mean)), batches=FIRST_WITHOUT_PADDING)
    unpadding, fused = Unpadding(8), FusedLayers()
    actual, expected = (
        trained(techniques, model=CustomModel(Pooling(masked_mean))) for techniques in ([unpadding, fused], [])
    )
    assert_near(final_weights(actual), final_weights(expected), what="weights")
    for technique in (unpadding, fused):
        found = technique.evidence["compared_with_untouched"]
        assert found["loss"] < 1e-5
        assert found["largest_gradient_difference"] < 1e-3
        assert "a tests CustomModel" in found["because"]


def test_check_never_skips_the_comparison_and_always_compares_stock_models_too() -> None:
    never, stock, always = Unpadding(8, check="never"), Unpadding(8), Unpadding(8, check="always")
    trained([never], model=CustomModel(Pooling(plain_mean)))
    trained([stock])
    trained([always])
    assert "compared_with_untouched" not in {*never.evidence, *stock.evidence}
    assert always.evidence["compared_with_untouched"]["largest_gradient_difference"] < 1e-3


def test_the_comparison_does_not_affect_training() -> None:
    losses = []
    for check in ("always", "never"):
        recorder = Recorder()
        techniques: list[Any] = [Unpadding(8, check=check), FusedLayers(check=check)]  # type: ignore[arg-type]
        trained(techniques, model=tiny_bert(dropout=0.5), callbacks=[recorder])
        losses.append(recorder.losses)
    assert losses[0] == losses[1]


def test_half_a_batch_is_compared_if_the_untouched_model_runs_out_of_memory() -> None:
    """The untouched model runs out of memory with more than two rows."""
    rows: list[int] = []

    class Large(Pooling):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> Any:
            rows.append(len(input_ids))
            if is_untouched() and len(input_ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(input_ids, attention_mask, labels)

    unpadding = Unpadding(8)
    of_the_batch = {"weight": torch.tensor(1.0)}  # has no rows
    trained([unpadding], model=CustomModel(Large(masked_mean)), batches=[{**INPUTS, **of_the_batch}])
    assert rows == [4, 4, 2, 2, 4]
    assert "largest_gradient_difference" in unpadding.evidence["compared_with_untouched"]
    with pytest.raises(Refusal, match=DIFFERS):
        trained([Unpadding(8)], model=CustomModel(Large(plain_mean)), batches=[INPUTS])


class TrainingOnly(Pooling):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> Any:
        if not self.training:
            raise RuntimeError("only in training")
        return super().forward(input_ids, attention_mask, labels)


def test_a_comparison_that_fails_here_or_on_another_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison runs in eval mode, in which this model raises."""
    failed = "the comparison with the untouched model failed"
    with pytest.raises(Refusal, match=rf"{failed} \(only in training\); .*never"):
        trained([Unpadding(8)], model=CustomModel(TrainingOnly(plain_mean)), batches=[INPUTS])
    trained([Unpadding(8, check="never")], model=CustomModel(TrainingOnly(plain_mean)), batches=[INPUTS])
    monkeypatch.setattr(first_comparison, "any_rank", lambda *_: True)
    with pytest.raises(Refusal, match=rf"{failed} \(on another rank\)"):
        trained([Unpadding(8)], model=CustomModel(Pooling(masked_mean)), batches=[INPUTS])


@pytest.mark.parametrize("method", ["eval", "predict"])
def test_evaluation_or_prediction_without_training_compares_outputs(method: str) -> None:
    spec = DataSpec(DataLoader(Batches([INPUTS]), batch_size=None), get_num_samples_in_batch=lambda b: 4)
    given = Evaluator(label="eval", dataloader=spec, metric_names=[], device_eval_microbatch_size=4)
    for pool in (masked_mean, plain_mean):
        trainer = make_trainer([Unpadding(8)], model=CustomModel(Pooling(pool)))
        differs = pytest.raises(Refusal, match="its outputs differ")
        with differs if pool is plain_mean else contextlib.nullcontext():
            getattr(trainer, method)(given if method == "eval" else spec)
        trainer.close()


class Tagger(ComposerModel):
    """Its labels have another name, so only its loss knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("bert", "tokens")

    def forward(self, batch: Batch) -> Any:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def loss(self, outputs: Any, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        return nn.functional.cross_entropy(outputs.view(-1, 2), batch["tags"].view(-1))


@pytest.mark.parametrize("reads", [True, False])
def test_a_comparison_in_a_prediction_is_repeated_with_the_loss(reads: bool) -> None:
    """A prediction compares only outputs at real tokens; the loss of training may read padding."""
    batches = [batch([9, 4, 12], seed=seed) for seed in range(2)]
    for inputs in batches:
        tags = inputs["input_ids"] % 2
        inputs["tags"] = tags if reads else tags.masked_fill(inputs["attention_mask"] == 0, -100)
    trainer = make_trainer([Unpadding(8)], model=Tagger(), batches=batches)
    trainer.predict(data_spec(batches))
    with pytest.raises(Refusal, match=DIFFERS) if reads else contextlib.nullcontext():
        fit_and_close(trainer)


def sharp_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    scores = query @ key.transpose(2, 3) if mask is None else query @ key.transpose(2, 3) + mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("technique", [Unpadding, SDPAAttention])
def test_custom_attention_is_not_replaced_silently(technique: Any) -> None:
    AttentionInterface.register("sharp", sharp_attention)
    AttentionMaskInterface.register("sharp", eager_mask)
    model = tiny_bert()
    model.set_attn_implementation("sharp")
    with pytest.raises(Refusal, match=rf"{DIFFERS}.*attention is 'sharp'"):
        trained([technique()], model=model)


def test_a_replaced_loss_of_the_wrapper_is_a_change() -> None:
    model = HuggingFaceModel(tiny_bert(), use_logits=True)
    model.loss = lambda outputs, batch: outputs["loss"]  # type: ignore[method-assign]
    assert changes_to(model) == ["the model has its own loss"]


# In other loops, a transformers model's first calls are compared.


class MeanPooler(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_pooler_that_reads_padding_is_refused_in_the_first_call(when: str, gradients: bool) -> None:
    reference, model = tiny_bert(), tiny_bert()
    reference.bert.pooler = MeanPooler()
    if when == "before":
        model.bert.pooler = MeanPooler()
    apply_recommended(model)
    if when == "after":
        model.bert.pooler = MeanPooler()
    with torch.set_grad_enabled(gradients):
        with pytest.raises(ValueError, match=r"unpadding does not support this model: .*the model is restored"):
            model(**INPUTS)
        assert_near([model(**INPUTS).logits], [reference(**INPUTS).logits])
    assert not unpadded_encoders(model)


@pytest.mark.parametrize(("check", "calls"), [("auto", 0), ("always", 2), ("never", 0)])
def test_which_calls_are_compared(check: Any, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    outcome_of = encoder_swap.outcome_of

    def outcome(*given: Any) -> Any:
        seen.append(given)
        return outcome_of(*given)

    monkeypatch.setattr(encoder_swap, "outcome_of", outcome)
    model = tiny_bert()
    unpad(model, 8, check=check)
    for _ in range(2):
        model(**INPUTS).loss.backward()
    assert len(seen) == calls


class Counts(BertModel):
    """Keeps a running mean and a number of calls, both in place and by assignment."""

    calls: Tensor
    mean: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * output.pooler_output.detach().mean(0)
        output.pooler_output = (output.pooler_output - self.mean) * self.calls
        return output


def test_a_comparison_leaves_buffers_as_they_were() -> None:
    models: Any = tiny_bert(), tiny_bert()
    for model in models:
        model.bert.__class__ = Counts
        model.bert.register_buffer("calls", torch.zeros(()))
        model.bert.register_buffer("mean", torch.zeros(32))
    unpad(models[1], 8, check="auto")
    for _ in range(3):
        assert_near([models[1](**INPUTS).loss], [models[0](**INPUTS).loss])
    assert_near([models[1].bert.calls, models[1].bert.mean], [models[0].bert.calls, models[0].bert.mean])
