"""fused_layers with PEFT's LoRA adapters, compared with PEFT's own modules in the untouched model, on the CPU.

tests/reference/adapters.py compares the kernels' forward and backward passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from composer_speedups import FusedLayers, LoRA, Unpadding, apply, merged_state_dict
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.stock import changes_to
from composer_speedups.kernels.observing import counting
from tests.helpers.common import SAVING, batch, final_weights, plain_batches, tiny_bert, trained
from tests.helpers.exhaustive import family_params, others_exhaustive
from tests.helpers.masks import masked_batch, random_masks
from tests.helpers.models import FUSED, HEADS, tiny_model
from tests.helpers.ranks import on_ranks
from tests.reference.loop import eval_logits, gradients
from tests.reference.tolerance import assert_near

WITHOUT_ADAPTERS = {"modernbert": "ModernBertEncoderLayer", "esm": "EsmLayer"}
WITH_ADAPTERS = [family for family in FUSED if family not in WITHOUT_ADAPTERS]
Change = Callable[[Any], Any]


def adapted(model: Any, **settings: Any) -> Any:
    """Return a model of the user's own with adapters of some size, as after training."""
    torch.manual_seed(3)
    defaults: dict[str, Any] = {"target_modules": "all-linear", "r": 4, "lora_alpha": 12, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**{**defaults, **settings}))


def fused(model: Any, last_layer: Any = "needed") -> Any:
    unpad(model, 8)
    fuse(model, last_layer)
    return model


def compare(ours: Any, reference: Any, inputs: Any) -> None:
    """Check that loss, logits and gradients are the same, and that frozen parameters have none."""
    results = []
    for model in (ours, reference):
        model.zero_grad()
        output = model(**inputs)
        if output.loss.requires_grad:  # it does not if all adapters are merged
            output.loss.backward()
        results.append([output.loss.detach(), output.logits.detach(), gradients(model)])
    (loss, logits, grads), (expected_loss, expected_logits, expected_grads) = results
    mask = inputs["attention_mask"].bool()
    kept = mask if logits.ndim == 3 else mask.any(-1)
    assert_near([loss, logits[kept]], [expected_loss, expected_logits[kept]])
    assert grads.keys() == expected_grads.keys()
    if expected_grads:
        assert_near(grads, expected_grads)


@pytest.mark.parametrize("bias", others_exhaustive(["none", "lora_only"], "lora_only".__eq__))
@pytest.mark.parametrize("head", others_exhaustive(HEADS, "classification".__eq__))
@pytest.mark.parametrize("family", family_params(WITH_ADAPTERS))
def test_a_peft_model_computes_as_untouched(family: Any, head: Any, bias: str) -> None:
    reference = adapted(tiny_model(family, head), bias=bias, rank_pattern={"query": 2, "query_proj": 2})
    ours = fused(copy.deepcopy(reference))
    for number, mask in enumerate(random_masks(6)):
        with counting() as ran:
            compare(ours, reference, masked_batch(mask, head, seed=number))
        assert not ran["unfused_layer"]


def test_lora_leaves_a_model_that_needs_no_comparison() -> None:
    model = tiny_bert()
    apply(model, [LoRA()])
    assert changes_to(model) == []
    model.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda *_: None)
    assert changes_to(model) == ["bert.encoder.layer.0.attention.self.query has a forward hook"]


def two_active(model: Any) -> Any:
    model.add_adapter("second", LoraConfig(target_modules=["query"], r=2, init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


def with_a_hook(model: Any) -> Any:
    query = model.base_model.model.bert.encoder.layer[0].attention.self.query
    query.lora_A["default"].register_forward_hook(lambda _m, _i, out: 2 * out)
    return model


def with_another_dropout(model: Any) -> Any:
    query = model.base_model.model.bert.encoder.layer[0].attention.self.query
    query.lora_dropout["default"] = nn.Tanh()
    return model


# Name → adapters that the kernels do not know, and the reason.
UNKNOWN: dict[str, tuple[Change, str]] = {
    "DoRA": (lambda model: adapted(model, use_dora=True), r"query has an adapter with DoRA"),
    "bias": (lambda model: adapted(model, lora_bias=True), r"query has an adapter with a bias \(lora_bias\)"),
    "two": (lambda model: two_active(adapted(model)), r"query has several active adapters \(default, second\)"),
    "hook": (lambda model: with_a_hook(adapted(model)), r"query has a forward hook"),
    "dropout": (lambda model: with_another_dropout(adapted(model)), r"has an adapter with Tanh instead of Dropout"),
}


@pytest.mark.parametrize("adapters", others_exhaustive(UNKNOWN, "two".__eq__))
def test_adapters_that_the_kernels_do_not_know_are_refused(adapters: str) -> None:
    adapt, reason = UNKNOWN[adapters]
    reference = adapt(tiny_bert())
    ours = copy.deepcopy(reference)
    unpad(ours, 8)
    with pytest.raises(ValueError, match=reason):
        fuse(ours)
    compare(ours, reference, batch([5, 9, 3]))


def test_two_adapters_that_become_active_later_run_unfused() -> None:
    reference = adapted(tiny_bert())
    ours = fused(copy.deepcopy(reference))
    for model in (ours, reference):
        torch.manual_seed(8)
        two_active(model)
    with counting() as ran:
        compare(ours, reference, batch([5, 9, 3]))
    assert ran["unfused_layer"] == 2


@pytest.mark.parametrize("family", WITHOUT_ADAPTERS)
def test_other_layers_with_adapters_are_refused_by_name(family: Any) -> None:
    model = adapted(tiny_model(family))
    unpad(model, 8, check="never")
    what = f"adapters in BERT's layers and similar ones, not in {WITHOUT_ADAPTERS[family]}"
    with pytest.raises(ValueError, match=what):
        fuse(model)


def second(model: Any) -> None:
    model.add_adapter("second", LoraConfig(target_modules=["query", "dense"], r=2, init_lora_weights=False))
    model.set_adapter("second")


def merge(model: Any) -> None:
    model.merge_adapter()


@pytest.mark.parametrize("change", [second, merge], ids=["another adapter", "merged"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_adapters_of_the_moment_count(change: Change, when: str) -> None:
    reference = adapted(tiny_bert())
    ours = copy.deepcopy(reference)
    for model in (ours, reference):
        if model is ours and when == "after":
            fused(ours)
        torch.manual_seed(8)
        change(model)
        if model is ours and when == "before":
            fused(ours)
    with counting() as ran:
        compare(ours, reference, inputs := batch([5, 9, 3]))
    assert (ran["torch_layer"], ran["first_tokens"]) == (1, 1)
    for model in (ours, reference):
        model.eval()
    with torch.no_grad(), ours.disable_adapter(), reference.disable_adapter():
        assert_near([ours(**inputs).logits], [reference(**inputs).logits])


def test_dropout_of_adapters_draws_the_same_masks_as_peft() -> None:
    """In rows without padding, which have as many packed tokens as slots, torch draws the same numbers."""
    reference = adapted(tiny_bert(), lora_dropout=0.4).train()
    ours = fused(copy.deepcopy(reference), "all")
    losses = []
    for model in (ours, ours, reference):
        torch.manual_seed(6)
        losses.append(model(**batch([8, 8])).loss)
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2])
    torch.manual_seed(7)
    assert not torch.allclose(ours(**batch([8, 8])).loss, losses[0])
    with counting() as ran:
        ours(**batch([8, 8]))
    assert ran["torch_layer"] == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=["as written", "reversed", "rotated"])
def test_in_any_order_it_trains_to_the_weights_of_lora_alone(order: tuple[int, ...]) -> None:
    settings: dict[str, Any] = {"rank": 4, "alpha": 64.0}
    expected = final_weights(trained([LoRA(**settings)], batches=plain_batches()))
    techniques: list[Any] = [LoRA(**settings), Unpadding(8), FusedLayers()]
    trainer = trained([techniques[i] for i in order], batches=plain_batches())
    assert techniques[2].evidence["layers_ran"] == "1 for first tokens, 1 by torch"
    assert "compared_with_untouched" not in techniques[1].evidence, "adapters are known"
    assert techniques[0].evidence["parameters_moved"]
    assert_near(final_weights(trainer), expected, what="weights")


def test_the_merged_export_of_fused_layers_equals_the_adapters() -> None:
    model = tiny_bert()
    trained([LoRA(alpha=64.0), Unpadding(8), FusedLayers()], model=HuggingFaceModel(model, use_logits=True))
    stock = tiny_bert(seed=5)
    stock.load_state_dict(merged_state_dict(model))
    batches = [batch([5, 9, 3])]
    assert_near(eval_logits(stock, batches), eval_logits(fused(model), batches))
    untouched = torch.cat(eval_logits(tiny_bert(), batches))
    assert (torch.cat(eval_logits(stock, batches)) - untouched).abs().max() > 1e-2, "nothing was trained"


def test_resuming_is_exact_with_dropout(tmp_path: Path) -> None:
    def run(**settings: Any) -> Any:
        techniques = [LoRA(dropout=0.2), Unpadding(8), FusedLayers()]
        return trained(techniques, model=tiny_bert(dropout=0.1), batches=plain_batches(6), **settings)

    whole = run(save_folder=str(tmp_path), **SAVING)
    resumed = run(load_path=str(tmp_path / "ba2.pt"))
    torch.testing.assert_close(final_weights(resumed), final_weights(whole), rtol=0, atol=0)


@pytest.mark.exhaustive
def test_two_ranks_train_to_the_weights_of_one() -> None:
    batches = [batch([7, 3, 9, 5], seed=i) for i in range(3)]

    def learned() -> dict[str, Tensor]:
        own = batches
        if torch.distributed.is_initialized():  # the sampler gives each rank every second one
            own = [{k: v[2 * rank : 2 * rank + 2] for k, v in b.items()} for b in batches for rank in range(2)]
        model = tiny_bert()
        torch.manual_seed(0)
        apply(model, [LoRA(alpha=64.0)]).undo()  # before, so that the adapters begin alike
        techniques = [LoRA(alpha=64.0), Unpadding(8), FusedLayers()]
        trainer = trained(techniques, model=model, batches=own, max_duration="3ba")
        return {name.replace("module.", ""): w.clone() for name, w in final_weights(trainer).items()}

    one = learned()
    first, other = on_ranks(learned)
    torch.testing.assert_close(first, other, rtol=0, atol=0)
    assert_near(first, one, what="weights")
