"""Calls of an unpadded model by other ways than its usual one: what the untouched model computes, or a refusal.

Positional arguments, labels that never reach the model, threads, a direct call of ``forward``, code that
reads padding, tracing, and the transformations of torch. Each case is a way in which other projects call a model.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForPreTraining, BertForSequenceClassification, BertModel, MPNetModel

from composer_speedups import apply_recommended
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import Batch, batch, tiny_bert, without_labels
from tests.helpers.exhaustive import family_params
from tests.helpers.masks import masked_batch
from tests.helpers.models import EVERY, FUSED, UNPADDED, Family, fit_batches, tiny_model
from tests.reference.loop import counted, gradients
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.outside


def labelled_padding(model: Any) -> Batch:
    """A batch of tokens whose padding has labels, too."""
    (inputs,) = fit_batches(model, [batch([5, 12, 9])])
    return {**inputs, "labels": torch.arange(36).view(3, 12) % 2}


def ran(model: nn.Module) -> list[str | None]:
    return [encoder.ran for encoder in unpadded_encoders(model)]


def compared(reference: Any, model: Any, loss: Callable[[Any], Tensor]) -> None:
    """Compare a loss and all its gradients."""
    results = []
    for module in (reference, model):
        module.zero_grad()
        value = loss(module)
        value.backward()
        results.append([value.detach(), *gradients(module).values()])
    assert_near(results[1], results[0])


@pytest.mark.parametrize("family", family_params(EVERY))
def test_positional_labels_on_padding_are_seen(family: Family) -> None:
    reference, model = tiny_model(family, "tokens"), tiny_model(family, "tokens")
    unpad(model, 8)
    inputs = labelled_padding(reference)
    names = ["input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels"]
    if family == "distilbert":
        names = ["input_ids", "attention_mask", "inputs_embeds", "labels"]
    elif family in ("mpnet", "modernbert", "esm", "eurobert"):
        names = ["input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels"]
    compared(reference, model, lambda module: module(*(inputs.get(name) for name in names)).loss)
    assert ran(model) == ["padded"]


@pytest.mark.parametrize("by", ["forward", "apply"])
def test_a_direct_call_of_forward_is_described_too(by: str) -> None:
    """PEFT's tuners call ``model.forward`` instead of ``model``, which skips hooks."""
    reference, model = tiny_model("bert", "tokens"), tiny_model("bert", "tokens")
    unpad(model, 8)
    inputs = labelled_padding(reference)
    compared(reference, model, lambda module: (module.forward(**inputs) if by == "forward" else module(**inputs)).loss)
    assert ran(model) == ["padded"]


@pytest.mark.parametrize("family", family_params(UNPADDED))
@pytest.mark.parametrize("padding", ["labelled", "ignored"])
def test_labels_that_the_model_does_not_get(family: Family, padding: str) -> None:
    """A Trainer with label smoothing, or a loss of its own, computes the loss from the logits."""
    reference, model = tiny_model(family, "tokens"), tiny_model(family, "tokens")
    unpad(model, 8)
    inputs = labelled_padding(reference)
    labels = inputs.pop("labels")
    if padding == "ignored":
        labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)

    def loss(module: Any) -> Tensor:
        logits = module(**inputs).logits
        return nn.functional.cross_entropy(logits.view(-1, 2), labels.view(-1), label_smoothing=0.1)

    if padding == "labelled":
        with pytest.warns(UserWarning, match="the loss reads outputs at padding positions"):
            compared(reference, model, loss)
    else:
        compared(reference, model, loss)
    assert ran(model) == ["padded"], "gradients must show first that padding is not read"
    compared(reference, model, loss)
    assert ran(model) == ["unpadded" if padding == "ignored" else "padded"]
    with torch.no_grad():
        assert_near([loss(model)], [loss(reference)])


def test_a_later_gradient_at_padding_is_an_error() -> None:
    model = tiny_model("bert", "tokens")
    unpad(model, 8)
    inputs = labelled_padding(model)
    labels = inputs.pop("labels")
    for targets in (labels.masked_fill(inputs["attention_mask"] == 0, -100), labels):
        loss = nn.functional.cross_entropy(model(**inputs).logits.view(-1, 2), targets.view(-1))
        if targets is labels:
            with pytest.raises(RuntimeError, match="the loss reads outputs at padding positions"):
                loss.backward()
        else:
            loss.backward()


def test_a_pretraining_head_reads_labelled_tokens() -> None:
    config = tiny_bert().config
    torch.manual_seed(0)
    reference = BertForPreTraining(config).eval()
    model = copy.deepcopy(reference)
    unpad(model, 8)
    inputs = labelled_padding(reference)
    for labels, expected in (
        (inputs["labels"], "padded"),
        (masked_batch(inputs["attention_mask"], "mlm")["labels"], "unpadded"),
    ):
        given = {**inputs, "labels": labels, "next_sentence_label": torch.tensor([0, 1, 0])}
        compared(reference, model, lambda module, given=given: module(**given).loss)  # type: ignore[misc]
        assert ran(model) == [expected]


def test_a_frozen_encoder_is_observed_too() -> None:
    model = tiny_model("bert", "tokens")
    model.bert.requires_grad_(False)
    unpad(model, 8)
    inputs = labelled_padding(model)
    labels = inputs.pop("labels").masked_fill(inputs["attention_mask"] == 0, -100)
    for expected in ("padded", "unpadded"):
        nn.functional.cross_entropy(model(**inputs).logits.view(-1, 2), labels.view(-1)).backward()
        assert ran(model) == [expected]


# Code of one's own that reads padding.


class MeanPooler(nn.Module):
    """A pooler that takes the mean of all slots, or of those with a token if a mask is set."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


@pytest.mark.parametrize("apply", ["unpadding", "recommended"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_pooler_that_reads_padding_is_refused(apply: str, when: str, gradients: bool) -> None:
    reference, model = tiny_bert(), tiny_bert()
    reference.bert.pooler = MeanPooler()
    if when == "before":
        model.bert.pooler = MeanPooler()
    apply_recommended(model) if apply == "recommended" else unpad(model)
    if when == "after":
        model.bert.pooler = MeanPooler()
    inputs = batch([5, 12, 9])
    with torch.set_grad_enabled(gradients):
        with pytest.raises(ValueError, match=r"unpadding does not support this model: .*the model is restored"):
            model(**inputs)
        assert_near([model(**inputs).logits], [reference(**inputs).logits])
    assert not unpadded_encoders(model)


def test_no_comparison_and_no_refusal_on_request() -> None:
    model = tiny_bert()
    model.bert.pooler = MeanPooler()
    apply_recommended(model, check="never")
    model(**batch([5, 12, 9]))
    assert ran(model) == ["unpadded"]
    with pytest.raises(ValueError, match="check must be 'auto', 'always' or 'never', not 'no'"):
        unpad(tiny_bert(), check="no")  # type: ignore[arg-type]


def test_every_model_is_compared_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer_speedups.algorithms.unpadding import first_calls

    calls: list[Any] = []
    outcome_of = first_calls.outcome_of

    def counted(*given: Any) -> Any:
        calls.append(given)
        return outcome_of(*given)

    monkeypatch.setattr(first_calls, "outcome_of", counted)
    for check, expected in (("auto", 0), ("always", 2)):
        model = tiny_bert()
        unpad(model, 8, check=check)  # type: ignore[arg-type]
        for _ in range(2):
            model(**batch([5, 12])).loss.backward()
        assert len(calls) == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [BertModel, MPNetModel])
def test_embeddings_that_are_pooled_with_the_mask_get_no_warning(kind: Any) -> None:
    family: Family = "bert" if kind is BertModel else "mpnet"
    reference = tiny_model(family).base_model
    model = copy.deepcopy(reference)
    apply_recommended(model) if kind is BertModel else unpad(model)
    inputs = without_labels(fit_batches(reference, [batch([5, 12, 9])])[0])

    def loss(module: Any) -> Tensor:
        mask = inputs["attention_mask"][..., None]
        return ((module(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)).square().sum()

    for expected in ("padded", "unpadded"):
        compared(reference, model, loss)
        assert ran(model) == [expected]


@pytest.mark.parametrize("gradients", [True, False])
def test_a_module_of_ones_own_that_reads_padding_is_refused(gradients: bool) -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = tiny_bert().bert

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.bert(ids, mask).last_hidden_state.mean(1)  # type: ignore[no-any-return]

    model, reference = Mine(), Mine()
    unpad(model, 8)
    inputs = batch([5, 12, 9])
    with torch.set_grad_enabled(gradients):
        # positional arguments have no names, so no padding can be added to a batch without any; this one has some
        with pytest.raises(ValueError, match="the model is a Mine"):
            model(inputs["input_ids"], inputs["attention_mask"])
        assert type(model) is Mine
        assert_near([model(inputs["input_ids"], inputs["attention_mask"])], [reference(*list(inputs.values())[:2])])


# Threads.


def test_threads_that_call_the_head_and_the_base_get_their_own_results() -> None:
    reference, model = tiny_bert().eval(), tiny_bert().eval()
    unpad(model, 8)
    fuse(model)
    batches = [batch([5, 12, 9], seed=seed) for seed in range(4)]
    wrong: list[str] = []

    def serve(base: bool) -> None:
        for i in range(30):
            inputs = without_labels(batches[i % 4])
            mask = inputs["attention_mask"].bool()
            with torch.no_grad():
                if base:
                    output, expected = (module.bert(**inputs).last_hidden_state[mask] for module in (model, reference))
                else:
                    output, expected = (module(**inputs).logits for module in (model, reference))
            if not torch.allclose(output, expected, atol=1e-5):
                wrong.append("base" if base else "head")

    workers = [threading.Thread(target=serve, args=(i % 2 == 0,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# Batches that stay padded, and dtypes of masks.


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["labelled", "left"])
@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_a_batch_that_stays_padded_is_computed_by_the_untouched_code(
    family: Family, padding: str, implementation: str
) -> None:
    head: Any = "tokens" if padding == "labelled" else "classification"
    reference, model = tiny_model(family, head), tiny_model(family, head)
    if implementation == "sdpa" and not reference._supports_sdpa:
        pytest.skip(f"transformers has no SDPA attention for {family}")
    for module in (reference, model):
        module.set_attn_implementation(implementation)
    unpad(model, 8)
    inputs = labelled_padding(reference) if head == "tokens" else fit_batches(reference, [batch([5, 20, 9])])[0]
    if padding == "left":
        inputs = {name: values.flip(1) if values.ndim == 2 else values for name, values in inputs.items()}
    expected, output = reference(**inputs), model(**inputs)
    assert ran(model) == ["padded"]
    assert model.config._attn_implementation == implementation
    # at every slot, padding included, and to the last bit
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=0)
    torch.testing.assert_close(output.loss, expected.loss, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.int32])
@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_masks_of_any_dtype(family: Family, dtype: torch.dtype) -> None:
    reference, model = tiny_model(family).eval(), tiny_model(family).eval()
    unpad(model, 8)
    (inputs,) = fit_batches(reference, [batch([5, 12, 9])])
    expected = reference(**inputs).logits
    cast = {**inputs, "attention_mask": inputs["attention_mask"].to(dtype)}
    assert_near([model(**cast).logits], [expected])
    counted(model, cast["attention_mask"])
    assert_near([model(**cast).logits], [expected])
    assert ran(model) == ["unpadded"]


# Tracing and transformations.


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta_v2"])
def test_transformations_of_torch_func(family: Family) -> None:
    reference, model = tiny_model(family).eval(), tiny_model(family).eval()
    unpad(model, 8)
    if family in FUSED:
        fuse(model)
    (inputs,) = fit_batches(reference, [batch([5, 12, 9])])
    results = []
    for module in (reference, model):
        weights = {name: p.detach() for name, p in module.named_parameters()}

        def loss(weights: Any, module: Any = module) -> Tensor:
            return torch.func.functional_call(module, weights, kwargs=inputs).loss  # type: ignore[no-any-return]

        results.append([*torch.func.grad(loss)(weights).values(), loss(weights)])
    assert_near(results[1], results[0])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_export_and_trace_use_the_untouched_code() -> None:
    reference, model = tiny_bert().eval(), tiny_bert().eval()
    unpad(model, 8)
    fuse(model)
    inputs = without_labels(batch([5, 12, 9]))
    exported = torch.export.export(model, (), inputs, strict=False).module()
    assert_near([exported(**inputs).logits], [reference(**inputs).logits])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        model.config.return_dict = False
        traced = torch.jit.trace(model, (ids, mask))
        model.config.return_dict = True
        other = batch([7, 3, 12], seed=1)
        output = traced(other["input_ids"], other["attention_mask"])
        assert_near([output[0]], [reference(**without_labels(other)).logits])
    model(**inputs)
    assert ran(model) == ["unpadded"]


def test_a_full_graph_names_what_to_do() -> None:
    model = tiny_bert().eval()
    unpad(model, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = without_labels(batch([5, 12, 9]))
    with pytest.raises(Exception, match=r"call undo_unpadding\(model\)"):
        compiled(**inputs)
    counted(model, inputs["attention_mask"])
    assert_near([compiled(**inputs).logits], [tiny_bert().eval()(**inputs).logits])


# Saving, resizing, tying.


@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_saving_loading_resizing_and_tied_weights(family: Family, tmp_path: Any) -> None:
    model = tiny_model(family, "mlm")
    reference = copy.deepcopy(model)
    unpad(model, 8)
    model.save_pretrained(tmp_path)
    loaded = type(reference).from_pretrained(tmp_path)
    assert (loaded.config.architectures, type(loaded)) == ([type(reference).__name__], type(reference))
    torch.testing.assert_close(loaded.state_dict(), reference.state_dict(), rtol=0, atol=0)
    for module in (reference, model):
        torch.manual_seed(0)
        if family != "esm":  # transformers does not resize the bias of its head
            module.resize_token_embeddings(72, mean_resizing=False)
        assert module.get_input_embeddings().weight is module.get_output_embeddings().weight
    inputs = masked_batch(batch([5, 12, 9])["attention_mask"], "mlm")
    (inputs,) = fit_batches(reference, [{**inputs, "input_ids": inputs["input_ids"].clamp(min=2)}])
    compared(reference, model, lambda module: module(**inputs).loss)


def test_a_model_that_calls_its_encoder_again_gets_the_untouched_result() -> None:
    class Twice(BertForSequenceClassification):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            hidden = self.bert(input_ids, attention_mask).last_hidden_state
            again = self.bert.encoder(torch.ones_like(hidden), attention_mask[:, None, None].to(hidden.dtype))
            return hidden[attention_mask.bool()], again.last_hidden_state

    results = []
    for changed in (False, True):
        torch.manual_seed(0)
        model = Twice._from_config(tiny_bert().config, attn_implementation="eager").eval()
        if changed:
            unpad(model, 8, check="never")
        inputs = batch([5, 12, 9])
        with torch.no_grad():
            results.append(model(inputs["input_ids"], inputs["attention_mask"]))
    assert_near([*results[1]], [*results[0]])
    assert ran(model) == ["padded"]
