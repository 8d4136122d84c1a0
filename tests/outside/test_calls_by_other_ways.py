"""Calls of an unpadded model by other ways than its usual one: what the untouched model computes, or a refusal.

Positional arguments, labels that never reach the model, threads, a direct call of ``forward``, tracing, and the
transformations of torch. Each case is a way in which other projects call a model.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForPreTraining, BertForSequenceClassification

from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.packing.encoder import with_counted_rows
from tests.helpers.common import Batch, batch, tiny_bert, without_labels
from tests.helpers.exhaustive import family_params
from tests.helpers.masks import masked_batch
from tests.helpers.models import EVERY, UNPADDED, Family, fit_batches, tiny_model
from tests.helpers.unpadded import compared, observed, pair, unpad_and_fuse, way
from tests.reference.loop import counted
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.outside


def labelled_padding(model: Any) -> Batch:
    """A batch of tokens whose padding has labels, too."""
    (inputs,) = fit_batches(model, [batch([5, 12, 9])])
    return {**inputs, "labels": torch.arange(36).view(3, 12) % 2}


@pytest.mark.parametrize("family", family_params(EVERY))
def test_labels_on_padding_are_seen_by_position_and_in_a_direct_call_of_forward(family: Family) -> None:
    """PEFT's tuners call ``model.forward`` instead of ``model``, which skips hooks."""
    reference, model = pair(family, "tokens")
    inputs = labelled_padding(reference)
    names = ["input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels"]
    if family == "distilbert":
        names = ["input_ids", "attention_mask", "inputs_embeds", "labels"]
    elif family in ("mpnet", "modernbert", "esm", "eurobert"):
        names = ["input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels"]
    for loss in (lambda m: m(*(inputs.get(name) for name in names)).loss, lambda m: m.forward(**inputs).loss):
        assert compared(reference, model, loss) == "padded"


@pytest.mark.parametrize("family", family_params(UNPADDED))
@pytest.mark.parametrize("padding", ["labelled", "ignored"])
def test_labels_that_the_model_does_not_get(family: Family, padding: str) -> None:
    """A Trainer with label smoothing, or a loss of its own, computes the loss from the logits."""
    reference, model = tiny_model(family, "tokens"), tiny_model(family, "tokens")
    unpad(model, 8, check="auto")
    inputs = labelled_padding(reference)
    labels = inputs.pop("labels")
    if padding == "ignored":
        labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)

    def loss(module: Any) -> Tensor:
        logits = module(**inputs).logits
        return nn.functional.cross_entropy(logits.view(-1, 2), labels.view(-1), label_smoothing=0.1)

    if padding == "labelled":
        with pytest.raises(ValueError, match="the loss reads outputs at padding positions"):
            compared(reference, model, loss)
        return
    assert compared(reference, model, loss) == "padded", "gradients must show first that padding is not read"
    assert compared(reference, model, loss) == "packed"
    with torch.no_grad():
        assert_near([loss(model)], [loss(reference)])


def test_a_pretraining_head_reads_labelled_tokens() -> None:
    torch.manual_seed(0)
    reference = BertForPreTraining(tiny_bert().config).eval()
    model = copy.deepcopy(reference)
    unpad(model, 8)
    inputs = labelled_padding(reference)
    for labels, expected in (
        (inputs["labels"], "padded"),
        (masked_batch(inputs["attention_mask"], "mlm")["labels"], "packed"),
    ):
        given = {**inputs, "labels": labels, "next_sentence_label": torch.tensor([0, 1, 0])}
        assert compared(reference, model, lambda module: module(**given).loss) == expected  # noqa: B023


def test_threads_that_call_the_head_and_the_base_get_their_own_results() -> None:
    reference, model = pair(apply=unpad_and_fuse)
    reference.eval(), model.eval()
    batches = [batch([5, 12, 9], seed=seed) for seed in range(4)]
    wrong: list[str] = []

    def serve(base: bool) -> None:
        for i in range(30):
            inputs = without_labels(batches[i % 4])
            mask = inputs["attention_mask"].bool()
            with torch.no_grad(), with_counted_rows(model, inputs, inputs):
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


@pytest.mark.parametrize("padding", ["labelled", "left"])
@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_a_batch_that_stays_padded_is_computed_by_the_untouched_code(family: Family, padding: str) -> None:
    """Also if another attention is chosen later; at every slot, padding included, and to the last bit."""
    head: Any = "tokens" if padding == "labelled" else "classification"
    reference, model = pair(family, head)
    inputs = labelled_padding(reference) if head == "tokens" else fit_batches(reference, [batch([5, 20, 9])])[0]
    if padding == "left":
        inputs = {name: values.flip(1) if values.ndim == 2 else values for name, values in inputs.items()}
    for implementation in ("eager", "sdpa", "eager") if reference._supports_sdpa else ("eager",):
        for module in (reference, model):
            module.set_attn_implementation(implementation)
        expected, output = reference(**inputs), model(**inputs)
        assert way(observed(lambda: model(**inputs))) == "padded"
        assert model.config._attn_implementation == implementation
        torch.testing.assert_close([output.logits, output.loss], [expected.logits, expected.loss], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.int32])
@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_masks_of_any_dtype(family: Family, dtype: torch.dtype) -> None:
    reference, model = pair(family)
    (inputs,) = fit_batches(reference, [batch([5, 12, 9])])
    cast = {**inputs, "attention_mask": inputs["attention_mask"].to(dtype)}
    for given in (cast, counted(model, cast)):
        assert compared(reference, model, lambda m: m(**(given if m is model else inputs)).loss) == "packed"  # noqa: B023


# Tracing and transformations.


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta_v2"])
def test_transformations_of_torch_func(family: Family) -> None:
    reference, model = pair(family, apply=unpad_and_fuse)
    (inputs,) = fit_batches(reference, [batch([5, 12, 9])])
    results = []
    for module in (reference.eval(), model.eval()):
        weights = {name: p.detach() for name, p in module.named_parameters()}

        def loss(weights: Any, module: Any = module) -> Tensor:
            return torch.func.functional_call(module, weights, kwargs=inputs).loss  # type: ignore[no-any-return]

        results.append([*torch.func.grad(loss)(weights).values(), loss(weights)])
    assert_near(results[1], results[0])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_export_and_trace_use_the_untouched_code() -> None:
    reference, model = pair(apply=unpad_and_fuse)
    reference.eval(), model.eval()
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
    assert way(observed(lambda: model(**inputs))) == "packed"


def test_a_full_graph_names_what_to_do() -> None:
    reference, model = pair()
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    inputs = without_labels(batch([5, 12, 9]))
    with pytest.raises(Exception, match="unpadding reads the number of tokens on the host"):
        compiled(**inputs)
    with with_counted_rows(model, inputs, inputs):
        assert_near([compiled(**inputs).logits], [reference.eval()(**inputs).logits])


# Saving, resizing, tying.


@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_saving_loading_resizing_and_tied_weights(family: Family, tmp_path: Any) -> None:
    reference, model = pair(family, "mlm")
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


class Twice(BertForSequenceClassification):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.bert(input_ids, attention_mask).last_hidden_state
        again = self.bert.encoder(torch.ones_like(hidden), attention_mask[:, None, None].to(hidden.dtype))
        return hidden[attention_mask.bool()], again.last_hidden_state


def test_a_model_that_calls_its_encoder_again_gets_the_untouched_result() -> None:
    results, inputs = [], batch([5, 12, 9])
    for changed in (False, True):
        torch.manual_seed(0)
        model = Twice._from_config(tiny_bert().config, attn_implementation="eager").eval()
        if changed:
            unpad(model, 8)
        with torch.no_grad():
            results.append(model(inputs["input_ids"], inputs["attention_mask"]))
    assert_near([*results[1]], [*results[0]])
    assert way(observed(lambda: model(inputs["input_ids"], inputs["attention_mask"]))) == "packed and padded"
