"""Unpadded encoders compared with the untouched model: plans, masks, dropout, adapters and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForQuestionAnswering, BertLMHeadModel

from composer_speedups import Unpadding
from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.core.compile_counts import OperatorRecorder
from composer_speedups.packing.attention import unpadded_attention
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.layout import lay_out
from tests.helpers.common import batch, tiny_bert
from tests.helpers.exhaustive import family_params
from tests.helpers.masks import masked_batch, random_masks
from tests.helpers.models import HEADS, UNPADDED, tiny_model
from tests.helpers.unpadded import pair, values
from tests.reference.loop import counted, gradients
from tests.reference.tolerance import assert_near


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Matrices this small do not benefit from a second thread."""
    torch.set_num_threads(1)


def compare(reference: Any, model: Any, inputs: dict[str, Tensor]) -> None:
    assert_near(values(model, inputs), values(reference, inputs))


def test_names_weights_modes_and_copies_are_kept() -> None:
    reference, model = tiny_bert(), tiny_bert().eval()
    model.bert.embeddings.requires_grad_(False)
    seen: list[int] = []
    assert unpad(model, check="never") == ["bert.encoder"]  # a hook would have the model compared
    assert unpad(model, check="never") == []
    model.bert.encoder.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=0)
    assert not model.bert.encoder.training
    assert not any(p.requires_grad for p in model.bert.embeddings.parameters())
    copied = copy.deepcopy(model)
    assert copied.bert.encoder is not model.bert.encoder
    copied(**batch([3, 5]))
    assert (copied.bert.encoder.ran, model.bert.encoder.ran, seen) == ("unpadded", None, [1])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_undo_restores_the_encoder_and_its_attention(attention: str) -> None:
    model = tiny_bert()
    model.set_attn_implementation(attention)
    encoder = type(model.bert.encoder)
    unpad(model)
    assert model.config._attn_implementation == attention
    assert restore_encoders(model) == ["bert.encoder"]
    assert model.config._attn_implementation == attention
    assert type(model.bert.encoder) is encoder


@pytest.mark.parametrize("multiple", [1, 8, 64, 200])
def test_unused_entries_and_padding_have_no_influence(multiple: int) -> None:
    reference, model, encoder = pair("bert", "mlm", multiple)
    inputs = masked_batch(random_masks(3)[2], "mlm")
    compare(reference, model, inputs)
    packed = lay_out(inputs["attention_mask"], int(inputs["attention_mask"].sum()), multiple).indices_T
    assert len(packed) == {1: 23, 8: 24, 64: 64, 200: 64}[multiple], "at most its 34 slots, rounded up to 64"
    hidden = torch.randn(*inputs["input_ids"].shape, 32, requires_grad=True)
    mask = inputs["attention_mask"].bool()
    encode, encoder.packing.padding_reader = model.eval().bert, None  # nothing reads padding
    output = encode(inputs_embeds=hidden, attention_mask=mask).last_hidden_state
    assert_near(output[~mask], torch.zeros_like(output[~mask]))
    noise = torch.where(mask[..., None], hidden, 100.0).detach()
    torch.testing.assert_close(encode(inputs_embeds=noise, attention_mask=mask).last_hidden_state, output)
    (output**2).sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad[~mask].any()
    assert hidden.grad[mask].abs().amin(-1).all()


@pytest.mark.parametrize("head", HEADS)
def test_an_all_padding_batch_gives_no_nan(head: str) -> None:
    _, model, _ = pair("bert", head)
    output = model(**masked_batch(torch.zeros(3, 5, dtype=torch.long), head))
    assert output.logits.isfinite().all()
    output.logits.sum().backward()
    assert all(g.isfinite().all() for g in gradients(model).values())


def test_a_plan_is_valid_only_for_its_mask() -> None:
    reference, model, _ = pair()
    planned, other = batch([3, 7, 2], 9), batch([5, 7, 2], 9)
    counted(model, planned["attention_mask"])
    compare(reference, model, planned)
    with pytest.raises(RuntimeError, match="differs from the planned one"):
        model(**other)
    without = {k: v for k, v in planned.items() if k != "attention_mask"}
    with pytest.raises(RuntimeError, match="differs from the planned one"):
        model(**without)
    compare(reference, model, batch([5, 7], 8))  # another shape: the encoder makes its own plan
    counted(model, None)
    compare(reference, model, other)
    with pytest.raises(ValueError, match="0 unpadded encoders"):
        counted(reference, planned["attention_mask"])


def test_a_plan_to_stay_padded_is_valid_only_for_its_mask() -> None:
    reference, model, encoder = pair()
    planned, other = batch([3, 7, 2], 9), batch([5, 7], 8)
    planned["attention_mask"] = planned["attention_mask"].flip(1)  # the head reads padding
    counted(model, planned["attention_mask"])
    compare(reference, model, planned)
    assert encoder.ran == "padded"
    compare(reference, model, other)
    assert encoder.ran == "unpadded"
    with pytest.raises(RuntimeError, match="differs from the planned one"):
        model(**batch([3, 7, 2], 9))


@pytest.mark.parametrize("planned", [False, True])
def test_a_batch_without_rows_has_the_untouched_models_result_or_error(planned: bool) -> None:
    reference, model, _ = pair()
    inputs = {name: values[:0] for name, values in batch([3, 8]).items()}
    if planned:
        counted(model, inputs["attention_mask"])
    outcomes = []
    for network in (reference, model):
        try:
            outcomes.append(str(network(**inputs).logits.shape))
        except RuntimeError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_calls_count_their_tokens_unless_they_have_no_mask() -> None:
    reference, model, encoder = pair()
    inputs = batch([5, 5], 5)
    for count, attention in enumerate(({}, {"attention_mask": inputs.pop("attention_mask")})):
        assert_near([model(**inputs, **attention).logits], [reference(**inputs, **attention).logits])
        assert (encoder.ran, encoder.packing.counted) == ("unpadded", count)


def test_batches_with_query_key_masks_run_padded() -> None:
    reference, model, encoder = pair()
    inputs = batch([6, 6, 6], 6)
    causal = torch.ones(6, 6).tril().bool().expand(3, 1, 6, 6)
    for mask in (causal, torch.zeros(3, 1, 6, 6).masked_fill(~causal, -1e9)):
        expected = reference(**{**inputs, "attention_mask": mask}).logits
        assert_near(model(**{**inputs, "attention_mask": mask}).logits, expected)
        assert encoder.ran == "padded"


def test_batches_that_stay_padded_use_the_attention_that_the_model_has_now() -> None:
    reference, model, encoder = pair()
    inputs = batch([3, 7, 2], 9)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        compare(reference, model, inputs)
        assert encoder.ran == "unpadded"
        with OperatorRecorder() as operators:
            asked = model(**inputs, output_hidden_states=True)
        assert encoder.ran == "padded"
        assert ("_softmax" in operators.counts) == (implementation == "eager")
        assert_near(asked.hidden_states[1], reference(**inputs, output_hidden_states=True).hidden_states[1])


@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_attention_dropout_is_applied_only_in_training(family: str) -> None:
    model = tiny_model(family, attention_dropout=0.5)
    unpad(model)
    inputs = batch([6, 9, 12])
    assert not torch.equal(model.train()(**inputs).logits, model(**inputs).logits)
    torch.testing.assert_close(model.eval()(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)


def test_dropped_weights_are_scaled_as_in_eager_attention() -> None:
    """With values of 1, a row's output is the sum of the kept weights, divided by the probability of keeping."""
    mask = torch.ones(8, 32, dtype=torch.bool)
    plan = lay_out(mask, mask.numel(), 64)
    query, value = torch.zeros(1, 2, 256, 4), torch.ones(1, 2, 256, 4)
    torch.manual_seed(0)
    sums, weights = unpadded_attention(nn.Identity(), query, query, value, None, dropout=0.25, layout=plan)
    assert weights is None
    expected_deviation = (0.25 / 0.75 / 32) ** 0.5  # 32 weights of 1/32, each kept with probability 0.75
    assert abs(float(sums.mean()) - 1) < 0.02
    assert abs(float(sums[..., 0].std()) - expected_deviation) < 0.02


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_recomputes_packed_layers(reentrant: bool) -> None:
    reference, model, encoder = pair()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for network in (reference, model):
        network.train()
    compare(reference, model, batch([3, 9, 12, 1]))
    assert encoder.ran == "unpadded"


def test_unsupported_models_are_refused_and_not_changed() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=64, **sizes)
    decoder = BertLMHeadModel(BertConfig(vocab_size=64, is_decoder=True, **sizes))
    chunked = tiny_bert()
    chunked.config.chunk_size_feed_forward = 2
    for model, reason in [
        (BertForQuestionAnswering(config), "ForQuestionAnswering, whose loss includes padding"),
        (decoder, "decoder"),
        (chunked, "chunk_size_feed_forward=0"),
        (tiny_bert().bert.encoder, "BertEncoder is only the encoder"),
        (nn.Linear(2, 2), "without transformers' modules"),
    ]:
        with pytest.raises(ValueError, match=reason):
            unpad(model)
        assert not unpadded_encoders(model)
    for build in (lambda: unpad(tiny_bert(), 0), lambda: Unpadding(0)):
        with pytest.raises(ValueError, match="pad_to_multiple_of must be 1 to 65536"):
            build()
