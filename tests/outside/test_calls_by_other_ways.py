"""Calls of an unpadded model by other ways than its usual one: what the untouched model computes, or a refusal.

Positional arguments, labels that never reach the model, threads, a direct call of ``forward``, tracing, the
transformations of torch, and what depends on the padded batch or is read in each call. Each case is a way in which
other projects call a model.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers import BertForPreTraining
from transformers.integrations.neftune import activate_neftune

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.packing.encoder import with_counted_rows
from tests.helpers.common import Batch, batch, tiny_bert, without_labels
from tests.helpers.exhaustive import family_params
from tests.helpers.masks import masked_batch
from tests.helpers.models import EVERY, FUSED, UNPADDED, Family, fit_batches, tiny_model
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


# Tracing.


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta_v2"])
def test_transformations_of_torch_func_and_forward_mode(family: Family) -> None:
    reference, model = pair(family, apply=unpad_and_fuse)
    (inputs,) = fit_batches(reference, [batch([5, 12, 9])])
    results = []
    for module in (reference.eval(), model.eval()):
        weights = {name: p.detach() for name, p in module.named_parameters()}

        def loss(weights: Any, module: Any = module) -> Tensor:
            return torch.func.functional_call(module, weights, kwargs=inputs).loss  # type: ignore[no-any-return]

        with forward_ad.dual_level():
            dual = {name: forward_ad.make_dual(weight, torch.ones_like(weight)) for name, weight in weights.items()}
            tangent = forward_ad.unpack_dual(loss(dual)).tangent
        results.append([*torch.func.grad(loss)(weights).values(), loss(weights), tangent])
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


# What depends on the padded batch, or is read in each call.


def changed_pair(family: Family = "bert", **settings: Any) -> tuple[Any, Any, Batch]:
    """An untouched model, the same one unpadded and with fused layers, and a batch."""
    reference = tiny_model(family, "tokens" if family == "t5" else "classification", **settings)
    model = copy.deepcopy(reference)
    unpad_and_fuse(model, 64) if family in FUSED else unpad(model)
    (inputs,) = fit_batches(reference, [batch([5, 12, 9])])
    if family == "t5":
        inputs["labels"] = (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)
    return reference, model, inputs


def from_the_left(inputs: Batch) -> Batch:
    """The batch with its padding on the left."""
    return {name: value.flip(1) if value.ndim == 2 else value for name, value in inputs.items()}


@pytest.mark.parametrize(
    ("family", "setting", "before", "after"),
    [
        ("nomic_bert", "num_hidden_layers", 2, 1),
        ("eurobert", "num_hidden_layers", 2, 1),
        ("jina_embeddings_v3", "num_hidden_layers", 2, 1),
        ("albert", "num_hidden_layers", 2, 1),
        ("bert", "num_hidden_layers", 2, 1),  # where nothing reads it
        ("modernbert", "num_hidden_layers", 2, 1),
        ("modernbert", "sliding_window", 4, 1),
        ("modernbert", "classifier_pooling", "cls", "mean"),
        ("eurobert", "classifier_pooling", "mean", "bos"),
        ("bert", "is_decoder", False, True),
        ("esm", "is_decoder", False, True),
    ],
)
def test_a_setting_that_is_changed_later(family: Family, setting: str, before: Any, after: Any) -> None:
    layers = {} if setting == "num_hidden_layers" else {setting: before}
    reference, model, inputs = changed_pair(family, **layers)
    inputs = from_the_left(inputs) if after == "bos" else inputs
    for value in (before, after, before):
        setattr(reference.config, setting, value)
        setattr(model.config, setting, value)
        ran = compared(reference, model, lambda module: module(**inputs).loss)
    assert ran == "packed"


@pytest.mark.parametrize("family", [*family_params(EVERY), "t5"])
def test_neftune_adds_the_noise_of_the_padded_batch(family: Family) -> None:
    """transformers' hook divides the noise by the root of the row's width."""
    reference, model, inputs = changed_pair(family)
    for module in (reference.train(), model.train()):
        activate_neftune(module, 5.0)

    def loss(module: Any) -> Tensor:
        torch.manual_seed(0)
        return module(**inputs).loss  # type: ignore[no-any-return]

    assert compared(reference, model, loss) == "packed"


def gradient_penalty(model: Any, inputs: Batch) -> Tensor:
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"], labels=inputs["labels"]).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + gradient.square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", family_params(EVERY))
def test_a_gradient_penalty_is_refused_by_name(family: Family) -> None:
    reference, model, inputs = changed_pair(family)
    with pytest.raises(RuntimeError, match=r"^unpadding has no second derivative .*remove unpadding"):
        gradient_penalty(model, inputs)
    restore_encoders(model)
    compared(reference, model, lambda module: gradient_penalty(module, inputs))


def test_an_adapter_for_each_row() -> None:
    peft = pytest.importorskip("peft")
    reference, inputs = tiny_bert().eval(), without_labels(batch([5, 12, 9]))
    settings = peft.LoraConfig(target_modules=["query", "dense"], r=2, init_lora_weights=False)
    reference = peft.get_peft_model(reference, settings, "one")
    reference.add_adapter("two", settings)
    model = copy.deepcopy(reference.eval())
    unpad(model, 8)
    names = ["one", "__base__", "two"]
    for given, how in (({"adapter_names": names}, "padded"), ({}, "packed"), ({"adapter_names": names}, "padded")):
        with torch.no_grad():
            assert_near([model(**inputs, **given).logits], [reference(**inputs, **given).logits])
        assert compared(reference, model, lambda m: m(**inputs, **given).logits.square().sum()) == how  # noqa: B023


def test_a_data_parallel_model_is_refused() -> None:
    """If it wraps the changed model: torch then calls the last method of each module."""
    model = tiny_bert()
    unpad(model)
    with pytest.raises(ValueError, match=r"^composer_speedups does not support nn\.DataParallel; "):
        [module._replicate_for_data_parallel() for module in model.modules()]
