"""Custom models: adapters, hooks, heads, activations, shared and pruned modules, copies, other dtypes.

Results match the untouched model, or the technique is refused.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer.core import DataSpec, Evaluator
from composer.models import ComposerModel, HuggingFaceModel
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader
from transformers import (
    BertModel,
    ModernBertModel,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.bert.modeling_bert import BertSelfOutput

from composer_speedups import FusedLayers, SDPAAttention, Unpadding, apply_sdpa_attention
from composer_speedups.algorithms.fused_layers.fusing import fuse, unfuse
from composer_speedups.algorithms.fused_layers.modules import FusedLayer
from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.core import parity_checked_technique
from composer_speedups.core.errors import CannotRunError, TechniqueError
from composer_speedups.core.stock import changes_to
from composer_speedups.packing.comparison import FLOAT32, Outcome, compare
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.layout import lay_out
from composer_speedups.packing.planning import PlannedBatch
from tests.helpers.common import (
    Batch,
    Batches,
    Recorder,
    batch,
    final_weights,
    make_trainer,
    tiny_bert,
    trained,
    without_labels,
)
from tests.helpers.models import FAMILIES, FUSED, UNPADDED, tiny_model
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

INPUTS = batch([9, 16, 3, 12])
LAYER = r"bert\.encoder\.layer\.0"


def apply_both(model: nn.Module) -> nn.Module:
    """Apply unpadding and fused_layers to the model."""
    unpad(model, 8, check="never")
    fuse(model)
    return model


def layers_of(model: nn.Module) -> list[FusedLayer]:
    return [layer for layer in model.modules() if isinstance(layer, FusedLayer)]


def logits_without_padding(logits: Tensor, inputs: Batch) -> Tensor:
    """Drop the logits of slots or rows that contain no token and whose label is -100."""
    ignored = inputs["labels"] == -100 if "labels" in inputs else torch.zeros(len(logits), dtype=torch.bool)
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape[: ignored.ndim] != ignored.shape or mask.ndim != 2:
        return logits
    return logits[~ignored | (mask.bool() if ignored.ndim == 2 else mask.bool().any(-1))]


def assert_same(changed: nn.Module, reference: nn.Module, inputs: Batch = INPUTS, **more: Any) -> None:
    """Check that both models have the same logits, loss and gradients on one batch."""
    results = []
    for model in (changed, reference):
        model.zero_grad()
        outputs = model(**inputs, **more)
        outputs.loss.backward()
        results.append(
            (outputs.loss.detach(), logits_without_padding(outputs.logits.detach(), inputs), gradients(model))
        )
    (loss, logits, grads), (expected_loss, expected_logits, expected_grads) = results
    assert_near([loss, logits], [expected_loss, expected_logits], what="loss and logits")
    assert grads.keys() == expected_grads.keys()
    assert_near(grads, expected_grads, what="gradients")


# Changed layers.


class OwnIntermediate(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.dense = theirs.dense

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense(hidden_states).relu()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def patched_forward(layer: Any) -> None:
    stock = layer.output.forward
    layer.output.forward = lambda hidden, residual: 2 * stock(hidden, residual)


# Name → function that changes a layer, and the reason why the layer is not fused.
LAYER_CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "own activation": (
        lambda layer: layer.set_submodule("intermediate.intermediate_act_fn", nn.ReLU()),
        r"intermediate\.intermediate_act_fn is a torch ReLU instead of a transformers GELUActivation",
    ),
    "own intermediate": (
        lambda layer: layer.set_submodule("intermediate", OwnIntermediate(layer.intermediate)),
        r"intermediate is a tests OwnIntermediate",
    ),
    "patched forward": (patched_forward, r"output has its own forward"),
    "forward hook": (
        lambda layer: layer.attention.self.register_forward_hook(lambda _m, _i, out: (2 * out[0], *out[1:])),
        r"attention\.self has a forward hook",
    ),
    "forward pre-hook": (
        lambda layer: layer.output.dense.register_forward_pre_hook(lambda _m, args: (args[0] / 2,)),
        r"output\.dense has a forward pre-hook",
    ),
    "backward hook": (
        lambda layer: layer.intermediate.dense.register_full_backward_hook(lambda _m, grads, _o: (3 * grads[0],)),
        r"intermediate\.dense has a backward hook",
    ),
    "pruned": (
        lambda layer: prune.random_unstructured(layer.attention.self.query, "weight", 0.5),
        r"attention\.self\.query has a forward pre-hook",
    ),
    "parametrized": (
        lambda layer: parametrize.register_parametrization(layer.output.dense, "weight", Doubled()),
        r"output\.dense is a torch ParametrizedLinear",
    ),
    "weight norm": (
        lambda layer: nn.utils.parametrizations.weight_norm(layer.intermediate.dense),
        r"intermediate\.dense is a torch ParametrizedLinear",
    ),
    "RMS norm": (
        lambda layer: layer.set_submodule("output.LayerNorm", nn.RMSNorm(32, eps=1e-6)),
        r"output\.LayerNorm is a torch RMSNorm instead of a torch LayerNorm",
    ),
    "no bias": (
        lambda layer: layer.set_submodule("attention.self.key", nn.Linear(32, 32, bias=False)),
        r"attention\.self\.key has other parameters than its class builds \(one is missing\)",
    ),
    "bottleneck adapter": (
        lambda layer: layer.set_submodule(
            "output.dense", nn.Sequential(layer.output.dense, nn.Linear(32, 4), nn.Linear(4, 32))
        ),
        r"output\.dense is a torch Sequential",
    ),
}
every_layer_change = pytest.mark.parametrize(("change", "reason"), LAYER_CHANGES.values(), ids=LAYER_CHANGES)


@every_layer_change
def test_changed_layers_are_not_fused(change: Callable[[Any], Any], reason: str) -> None:
    model, reference = tiny_bert(), tiny_bert()
    for target in (model, reference):
        torch.manual_seed(4)
        for layer in target.bert.encoder.layer:
            change(layer)
    unpad(model, 8, check="never")
    with pytest.raises(ValueError, match=rf"cannot fuse any layer: {LAYER}\.{reason}"):
        fuse(model)
    assert not layers_of(model)
    assert_same(model, reference)


def changed_in_one_layer(change: Callable[[Any], Any], when: str) -> Any:
    """Change the first layer before or after applying both techniques; check the results and return the model."""
    model, reference = tiny_bert(), tiny_bert()
    if when == "after":
        apply_both(model)
    for target in (model, reference):
        torch.manual_seed(4)
        change(target.bert.encoder.layer[0])
    if when == "before":
        apply_both(model)
    assert_same(model, reference)
    return model


@every_layer_change
@pytest.mark.parametrize("when", ["before", "after"])
def test_only_the_changed_layer_runs_unfused(change: Callable[[Any], Any], reason: str, when: str) -> None:
    model = changed_in_one_layer(change, when)
    ran = [getattr(layer, "ran", None) for layer in model.bert.encoder.layer]
    assert ran == [None if when == "before" else "unfused", "first tokens"]


def another_function(layer: Any) -> None:
    layer.intermediate.intermediate_act_fn.act = torch.relu


def another_scale(layer: Any) -> None:
    layer.attention.self.scaling = 1.0


def own_feed_forward(layer: Any) -> None:
    stock = layer.feed_forward_chunk
    layer.feed_forward_chunk = lambda attention_output: 2 * stock(attention_output)


@pytest.mark.parametrize("change", [another_function, another_scale, own_feed_forward])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_changed_setting_or_method_is_respected(change: Callable[[Any], None], when: str) -> None:
    assert layers_of(changed_in_one_layer(change, when))[-1].ran == "first tokens"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_patched_class_is_respected(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = tiny_bert(), tiny_bert()
    if when == "after":
        apply_both(model)
    stock = BertSelfOutput.forward
    monkeypatch.setattr(BertSelfOutput, "forward", lambda self, a, b: 2 * stock(self, a, b))
    if when == "before":
        with pytest.raises(ValueError, match=r"transformers BertSelfOutput\.forward was replaced in its class"):
            apply_both(model)
    assert_same(model, reference)


@pytest.mark.filterwarnings("ignore:For backward hooks to be called", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_full_backward_hook])
def test_global_module_hooks_are_respected(register: Any) -> None:
    model, reference = apply_both(tiny_bert()).double(), tiny_bert().double()  # the hooks also double rounding errors

    def doubled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if not isinstance(module, nn.Linear):
            return None
        return 2 * outputs if isinstance(outputs, Tensor) else tuple(2 * tensor for tensor in inputs)

    handle = register(doubled)
    try:
        assert_same(model, reference)
        with pytest.raises(ValueError, match="cannot fuse any layer: every module has a hook"):
            apply_both(tiny_bert())
    finally:
        handle.remove()
    assert_same(model, reference)
    assert [layer.ran for layer in layers_of(model)] == ["torch", "first tokens"]


def last_layer_twice(model: Any, fused: Any) -> None:
    model.bert.encoder.layer[0] = model.bert.encoder.layer[1]


def fused_last_layer_first(model: Any, fused: Any) -> None:
    model.bert.encoder.layer[0] = copy.deepcopy(fused.bert.encoder.layer[1])


@pytest.mark.parametrize("build", [last_layer_twice, fused_last_layer_first])
def test_a_last_layer_that_also_runs_earlier_computes_every_token(build: Callable[[Any, Any], None]) -> None:
    model, reference = tiny_bert(), tiny_bert()
    build(model, apply_both(tiny_bert(seed=1)))
    build(reference, tiny_bert(seed=1))
    assert_same(apply_both(model), reference)


def sharp_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    scores = query @ key.transpose(2, 3) if mask is None else query @ key.transpose(2, 3) + mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("technique", [Unpadding, SDPAAttention])
def test_custom_attention_is_not_replaced_silently(technique: Any) -> None:
    AttentionInterface.register("sharp", sharp_attention)
    AttentionMaskInterface.register("sharp", eager_mask)
    model = tiny_bert()
    model.set_attn_implementation("sharp")
    with pytest.raises(CannotRunError, match=r"its result differs from the untouched model's.*attention is 'sharp'"):
        trained([technique()], model=model)


def test_hooks_of_a_whole_layer_run_and_it_is_fused() -> None:
    model, reference = tiny_bert(), tiny_bert()
    for target in (model, reference):
        target.bert.encoder.layer[0].register_forward_hook(lambda _m, _i, out: 2 * out)
        target.bert.encoder.layer[0].register_forward_pre_hook(lambda _m, args: (args[0] / 3, *args[1:]))
    apply_both(model)
    assert_same(model, reference)
    assert layers_of(model)[0].ran == "torch"


@pytest.mark.parametrize("submodule", ["attention.self", "attention.output", "output", "output.dropout"])
def test_dropout_follows_the_mode_of_each_submodule(submodule: str) -> None:
    model, reference = tiny_bert(dropout=0.5).train(), tiny_bert(dropout=0.5).train()
    for target in (model, reference):
        target.bert.embeddings.eval()
        target.dropout.eval()
        for layer in target.bert.encoder.layer:
            for name in ("attention.self", "attention.output", "output"):
                layer.get_submodule(name).eval()
            layer.get_submodule(submodule).train()
    apply_both(model)
    drops = model(**INPUTS).logits, model(**INPUTS).logits
    assert not torch.equal(*drops)
    for target in (model, reference):
        for layer in target.bert.encoder.layer:
            layer.get_submodule(submodule).eval()
    assert model.bert.encoder.layer[0].training
    assert_same(model, reference)


# Adapters.


def lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["query", "value"], init_lora_weights=False))


def dora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["query", "value"], use_dora=True, init_lora_weights=False))


def ia3(model: Any) -> Any:
    return get_peft_model(
        model, IA3Config(target_modules=["key", "value"], feedforward_modules=[], init_ia3_weights=False)
    )


def prefix(model: Any) -> Any:
    return get_peft_model(model, PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))


@pytest.mark.parametrize(
    ("adapt", "reason"), [(dora, "has an adapter with DoRA"), (ia3, "is a peft Linear instead of a torch Linear")]
)
def test_adapters_other_than_plain_lora_train_unpadded_and_unfused(adapt: Callable[[Any], Any], reason: str) -> None:
    torch.manual_seed(1)
    model = adapt(tiny_bert())
    reference = copy.deepcopy(model)
    unpad(model, 8)
    with pytest.raises(ValueError, match=rf"layer\.0\.attention\.self\.\w+ {reason}"):
        fuse(model)
    assert_same(model, reference)
    assert unpadded_encoders(model)[0].ran == "unpadded"


def test_peft_adapters_on_fused_layers_match_the_untouched_model() -> None:
    model, reference = apply_both(tiny_bert()), tiny_bert()
    adapted = []
    for base in (model, reference):
        torch.manual_seed(1)
        adapted.append(lora(base))
    assert_same(*adapted)


def test_prefix_tuning_matches_the_untouched_model() -> None:
    torch.manual_seed(1)
    model = prefix(tiny_bert())
    reference = copy.deepcopy(model)
    apply_both(model)
    assert_same(model, reference)


def test_a_trainer_refuses_fused_layers_on_dora_and_trains_without_it() -> None:
    def weights(*techniques: Any) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = trained(techniques, model=dora(tiny_bert())).state.model
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    with pytest.raises(
        TechniqueError, match=r"fused_layers: .*self\.query has an adapter with DoRA; remove it for this model"
    ):
        weights(Unpadding(8), FusedLayers())
    expected = weights()
    unpadding, fused = Unpadding(8), FusedLayers(on_unavailable="warn")
    with pytest.warns(UserWarning, match="continuing without fused_layers"):
        actual = weights(unpadding, fused)
    assert_near(actual, expected, what="weights")
    assert "DoRA" in unpadding.evidence["compared_with_untouched"]["because"]
    assert len(expected) > 4
    assert not fused.engaged


# Heads, poolers and hooks that read the last layer.


class MeanPooler(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.mean(1)


class FirstTwo(nn.Module):
    """A head for RoBERTa that reads the first two slots."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 2)

    def forward(self, features: Tensor, **_: Any) -> Tensor:
        return self.out(features[:, 0] + features[:, 1])


class Pooling(nn.Module):
    """An encoder with a custom head; ``pool`` is called with the last hidden state and the mask."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor], encoder: Any = None) -> None:
        super().__init__()
        self.bert, self.pool = encoder if encoder is not None else tiny_bert().bert, pool
        torch.manual_seed(2)
        self.out = nn.Linear(32, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = self.out(self.pool(self.bert(input_ids, attention_mask).last_hidden_state, attention_mask))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def plain_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.mean(1)


def plain_max(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.max(1).values


def last_slot(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[:, -1]


class CustomModel(ComposerModel):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        return self.model(**batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return outputs["loss"]


def test_a_direct_call_of_the_encoder_returns_every_token() -> None:
    for family in FAMILIES:
        model, reference = apply_both(tiny_model(family)).eval(), tiny_model(family).eval()
        inputs = without_labels(INPUTS)
        mask = inputs["attention_mask"]
        actual, expected = (
            masked_mean(target.base_model(**inputs).last_hidden_state, mask) for target in (model, reference)
        )
        assert_near([actual], [expected], what=family)
        assert layers_of(model)[-1].ran == "torch"
        model(**inputs)
        assert layers_of(model)[-1].ran == "first tokens"  # through the head
        actual = masked_mean(model.base_model(**inputs).last_hidden_state, mask)
        assert_near([actual], [expected], what=f"{family}, after a call through the head")


def test_after_a_failed_forward_pass_the_encoder_returns_every_token() -> None:
    model = apply_both(tiny_bert())
    with pytest.raises(ValueError, match="one of input_ids or inputs_embeds"):
        model(attention_mask=INPUTS["attention_mask"])
    assert model.bert(**without_labels(INPUTS)).last_hidden_state[0, 1:9].any()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_custom_pooler_receives_every_token(when: str) -> None:
    model, reference = tiny_bert(), tiny_bert()
    full = batch([16, 16])  # without padding, the mean is over real tokens
    for target in (model, reference):
        if when == "before" or target is reference:
            target.bert.pooler = MeanPooler()
    apply_both(model)
    if when == "after":
        model.bert.pooler = MeanPooler()
    assert_same(model, reference, full)
    assert layers_of(model)[-1].ran == "torch"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_custom_classifier_receives_every_token(when: str) -> None:
    model, reference = tiny_model("roberta"), tiny_model("roberta")
    torch.manual_seed(3)
    head = FirstTwo()
    reference.classifier = copy.deepcopy(head)
    if when == "before":
        model.classifier = head
    apply_both(model)
    model.classifier = head
    assert_same(model, reference)


@pytest.mark.parametrize("path", ["bert", "bert.encoder", "bert.encoder.layer.1", "bert.pooler"])
def test_a_hook_that_can_read_the_last_layer_receives_every_token(path: str) -> None:
    seen: list[Any] = []
    models = apply_both(tiny_bert()).eval(), tiny_bert().eval()
    for model in models:
        hooked = model.get_submodule(path)
        hooked.register_forward_hook(lambda _m, args, out: seen.append(args[0] if path == "bert.pooler" else out))
        model(**without_labels(INPUTS))
    states = [output if isinstance(output, Tensor) else output.last_hidden_state for output in seen]
    hidden = states[0] if states[0].shape[0] == 4 else None
    if hidden is None:  # the packed output of a layer
        assert states[0].abs().sum(-1)[0, :40].all()
        return
    mask = INPUTS["attention_mask"].bool()
    assert_near([hidden[mask]], [states[1][mask]])


def gradient_only(hidden: Tensor, mask: Tensor) -> Tensor:
    """Padding changes the gradients but not the outputs."""
    every_slot = hidden.pow(2).mean(1)
    return masked_mean(hidden, mask) + every_slot - every_slot.detach()


class Normed(Pooling):
    """A batch norm over all slots, and a head that reads the first slot."""

    def __init__(self) -> None:
        super().__init__(lambda hidden, _: self.norm(hidden.transpose(1, 2))[:, :, 0])
        self.norm = nn.BatchNorm1d(32)


FIRST_WITHOUT_PADDING = [batch([16, 16]), batch([16, 3])]


@pytest.mark.parametrize(
    ("build", "batches", "message"),
    [
        (lambda: Pooling(plain_mean), [INPUTS], "the loss is .* instead of "),
        (lambda: Pooling(plain_max), [INPUTS], "the loss is .* instead of "),
        (lambda: Pooling(last_slot), [INPUTS], "the loss is .* instead of "),
        (lambda: Pooling(gradient_only), [INPUTS], r"the gradient of \S+ differs by [\d.]+% on the first batch"),
        (lambda: Pooling(plain_mean), FIRST_WITHOUT_PADDING, "the loss is .* instead of "),
        (Normed, [INPUTS], "the loss is .* instead of "),
    ],
    ids=["mean", "max", "last slot", "gradient only", "no padding in the first batch", "batch norm"],
)
def test_a_head_that_reads_padding_is_refused(build: Callable[[], Any], batches: list[Batch], message: str) -> None:
    trainer = make_trainer([Unpadding(8)], model=CustomModel(build()), batches=batches)
    before = copy.deepcopy(trainer.state.model.state_dict())
    differs = rf"unpadding: its result differs from the untouched model's: {message}.*check: never"
    with pytest.raises(CannotRunError, match=differs):
        trainer.fit()
    assert not unpadded_encoders(trainer.state.model)
    torch.testing.assert_close(trainer.state.model.state_dict(), before, rtol=0, atol=0)
    trainer.close()


def test_compare_counts_the_parameters_that_lose_their_gradient() -> None:
    gradients = {"a": torch.ones(2), "b": torch.ones(2)}
    untouched, changed = Outcome(1.0, None, gradients), Outcome(1.0, None, {"b": torch.ones(2)})
    assert compare(untouched, changed, FLOAT32).beyond == "1 of 2 parameters get no gradient, a among them"


def test_a_head_that_reads_only_real_tokens_matches_the_untouched_model() -> None:
    trained([Unpadding(8)], model=CustomModel(Pooling(masked_mean)), batches=FIRST_WITHOUT_PADDING)
    unpadding, fused = Unpadding(8), FusedLayers()
    actual, expected = (
        trained(techniques, model=CustomModel(Pooling(masked_mean))) for techniques in ([unpadding, fused], [])
    )
    assert_near(final_weights(actual), final_weights(expected), what="weights")
    for technique in (unpadding, fused):
        compared = technique.evidence["compared_with_untouched"]
        assert compared["loss"] < 1e-5
        assert compared["largest_gradient_difference"] < 1e-3
        assert "a tests CustomModel" in compared["because"]


def test_with_warn_the_untouched_model_is_trained() -> None:
    techniques = Unpadding(8, on_unavailable="warn"), FusedLayers(on_unavailable="warn")
    with (
        pytest.warns(UserWarning, match="its result differs from the untouched model's"),
        pytest.warns(UserWarning, match="continuing without fused_layers"),
    ):
        actual = trained(techniques, model=CustomModel(Pooling(plain_mean)))
    expected = trained(model=CustomModel(Pooling(plain_mean)))
    assert_near(final_weights(actual), final_weights(expected), what="weights")
    assert [technique.engaged for technique in techniques] == [False, False]
    assert "add unpadding" in techniques[1].evidence["unavailable"]


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
            if not unpadded_encoders(self) and len(input_ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(input_ids, attention_mask, labels)

    unpadding = Unpadding(8)
    trained([unpadding], model=CustomModel(Large(masked_mean)), batches=[INPUTS])
    assert rows == [4, 4, 2, 2, 4]
    assert "largest_gradient_difference" in unpadding.evidence["compared_with_untouched"]
    with pytest.raises(CannotRunError, match="its result differs from the untouched model's"):
        trained([Unpadding(8)], model=CustomModel(Large(plain_mean)), batches=[INPUTS])


def test_a_failed_comparison_is_an_error() -> None:
    """The comparison runs in eval mode, in which this model raises."""

    class TrainingOnly(Pooling):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> Any:
            if not self.training:
                raise RuntimeError("only in training")
            return super().forward(input_ids, attention_mask, labels)

    def train(technique: Any) -> None:
        trained([technique], model=CustomModel(TrainingOnly(plain_mean)), batches=[INPUTS])

    with pytest.raises(
        CannotRunError, match=r"the comparison with the untouched model failed \(only in training\); .*never"
    ):
        train(Unpadding(8))
    warned = Unpadding(8, on_unavailable="warn")
    with pytest.warns(UserWarning, match="the comparison with the untouched model failed"):
        train(warned)
    assert warned.engaged is False
    train(Unpadding(8, check="never"))


def test_a_comparison_that_fails_on_another_rank_disables_the_technique_here_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parity_checked_technique, "any_rank", lambda *_: True)
    technique = Unpadding(8, on_unavailable="warn")
    with pytest.warns(UserWarning, match="failed \\(on another rank\\)"):
        trained([technique], model=CustomModel(Pooling(masked_mean)), batches=[INPUTS])
    assert technique.engaged is False


@pytest.mark.parametrize("method", ["eval", "predict"])
def test_evaluation_or_prediction_without_training_compares_outputs(method: str) -> None:
    spec = DataSpec(DataLoader(Batches([INPUTS]), batch_size=None), get_num_samples_in_batch=lambda b: 4)
    given = Evaluator(label="eval", dataloader=spec, metric_names=[], device_eval_microbatch_size=4)
    for pool in (masked_mean, plain_mean):
        trainer = make_trainer([Unpadding(8)], model=CustomModel(Pooling(pool)))
        differs = pytest.raises(CannotRunError, match="its outputs differ")
        with differs if pool is plain_mean else contextlib.nullcontext():
            getattr(trainer, method)(given if method == "eval" else spec)
        trainer.close()


@pytest.mark.parametrize("gradients", [True, False])
def test_a_function_compares_the_first_calls(gradients: bool) -> None:
    good, bad, untouched = Pooling(masked_mean), Pooling(plain_mean), Pooling(plain_mean)
    kind, names = type(good), {name: [*vars(module)] for name, module in good.named_modules()}
    for model in (good, bad):
        assert unpad(model, 8) == ["bert.encoder"]
        assert inspect.signature(model.forward) == inspect.signature(untouched.forward)
    with torch.set_grad_enabled(gradients):
        expected = Pooling(masked_mean)(**INPUTS)
        assert_near([good(**INPUTS)["logits"]], [expected["logits"]])
        with pytest.raises(ValueError, match=r"does not support this model: .* differ.* on the first batch"):
            bad(**INPUTS)
    assert not unpadded_encoders(bad)
    assert {name: [*vars(module)] for name, module in bad.named_modules()} == names
    assert type(bad) is kind
    assert_near([bad(**INPUTS)["logits"]], [untouched(**INPUTS)["logits"]])
    assert (type(good) is kind) == gradients, "the first call with gradients is compared, too"
    never = Pooling(plain_mean)
    unpad(never, 8, check="never")
    assert not torch.allclose(never(**INPUTS)["logits"], untouched(**INPUTS)["logits"])


# Several encoders, several calls.


class BiEncoder(ComposerModel):
    """One encoder that each forward pass calls twice, or two encoders; every call has its own mask."""

    def __init__(self, encoders: int = 1) -> None:
        super().__init__()
        self.bert = tiny_bert().bert
        self.other = tiny_bert(seed=1).bert if encoders == 2 else self.bert

    def forward(self, batch: Batch) -> Tensor:
        sides = [
            masked_mean(
                encoder(batch[f"input_ids{side}"], batch[f"attention_mask{side}"]).last_hidden_state,
                batch[f"attention_mask{side}"],
            )
            for side, encoder in (("", self.bert), ("_b", self.other))
        ]
        return sides[0] @ sides[1].T

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs, torch.arange(len(outputs), device=outputs.device))


def pairs(count: int = 3) -> list[Batch]:
    batches = []
    for seed in range(count):
        one, two = batch([9, 16, 3], seed=seed), batch([5, 2, 16], seed=50 + seed)
        batches.append({**one, "input_ids_b": two["input_ids"], "attention_mask_b": two["attention_mask"]})
    return batches


@pytest.mark.parametrize("encoders", [1, 2])
@pytest.mark.parametrize("fuse", [False, True])
def test_bi_encoders_match_the_untouched_model_with_a_plan_per_mask(encoders: int, fuse: bool) -> None:
    torch.manual_seed(0)
    expected = trained(model=BiEncoder(encoders), batches=pairs())
    trainer = make_trainer(
        [Unpadding(8), *([FusedLayers()] if fuse else [])], model=BiEncoder(encoders), batches=pairs()
    )
    trainer.fit()
    assert [encoder.packing.counted for encoder in unpadded_encoders(trainer.state.model)] == [0] * encoders, (
        "the forward passes must use the plans"
    )
    trainer.close()
    assert_near(final_weights(trainer), final_weights(expected), what="weights")


def test_a_mask_without_a_plan_is_planned_in_the_forward_pass() -> None:
    model, reference = apply_both(tiny_bert()), tiny_bert()
    planned, another = batch([9, 16, 3, 12]), batch([4, 4, 16, 1])
    (encoder,) = unpadded_encoders(model)
    mask = planned["attention_mask"]
    encoder.packing.planned = (PlannedBatch(mask, None, lay_out(mask, int(mask.sum()), 8)),)
    assert_same(model, reference, planned)
    assert encoder.packing.counted == 0
    assert_same(model, reference, another)
    assert encoder.packing.counted == 1


def test_training_after_no_grad_and_inference_mode() -> None:
    model, reference = apply_both(tiny_bert()), tiny_bert()
    with torch.no_grad():
        expected = reference(**INPUTS).logits
        assert_near([model(**INPUTS).logits], [expected])
    assert_same(model, reference)
    with torch.inference_mode():
        assert_near([model(**INPUTS).logits.clone()], [expected])
    assert_same(model, reference)


# Arguments of the model.


def test_a_base_model_runs_unpadded_and_is_saved_with_its_own_class(tmp_path: Any) -> None:
    reference = tiny_model("modernbert").model.eval()
    model = copy.deepcopy(reference)
    assert unpad(model, 8, check="never") == [""]
    inputs = without_labels(INPUTS)
    real = inputs["attention_mask"].bool()
    assert_near([model(**inputs).last_hidden_state[real]], [reference(**inputs).last_hidden_state[real]])
    assert unpadded_encoders(model)[0].ran == "unpadded"
    assert len(fuse(model)) == len(model.layers)
    assert_near([model(**inputs).last_hidden_state[real]], [reference(**inputs).last_hidden_state[real]])
    model.save_pretrained(tmp_path)
    assert '"ModernBertModel"' in (tmp_path / "config.json").read_text()
    assert type(ModernBertModel.from_pretrained(tmp_path)) is ModernBertModel


# Labels on padding.


def test_a_planned_batch_with_labels_on_padding_is_an_error() -> None:
    model = tiny_model("bert", "mlm")
    unpad(model, 8)
    counted(model, INPUTS["attention_mask"])
    with pytest.raises(RuntimeError, match="give padding the label -100"):
        model(**{**INPUTS, "labels": INPUTS["input_ids"]})
    model(**{**INPUTS, "labels": INPUTS["input_ids"].masked_fill(INPUTS["attention_mask"] == 0, -100)})


def test_a_trainer_with_labels_on_padding_continues_without_unpadding() -> None:
    batches = [
        {**inputs, "labels": inputs["input_ids"]} for inputs in (batch([9, 16, 3]), batch([9, 16, 3]), batch([7, 16]))
    ]
    with pytest.warns(UserWarning, match=r"the head reads padding: .* give padding the label -100"):
        actual = trained([Unpadding(8, on_unavailable="warn")], model=tiny_model("bert", "mlm"), batches=batches)
    expected = trained(model=tiny_model("bert", "mlm"), batches=batches)
    assert_near(final_weights(actual), final_weights(expected), what="weights")


def test_all_heads_of_a_shared_encoder_are_considered() -> None:
    """Rows begin with padding; the first head does not read the first slot, the second one does."""

    def shared() -> nn.ModuleDict:
        token, sequence = tiny_model("bert", "mlm"), tiny_bert()
        sequence.bert.encoder = token.bert.encoder
        return nn.ModuleDict({"token": token, "sequence": sequence})

    changed, reference = shared(), shared()
    apply_both(changed)
    flipped = {name: value.flip(1) for name, value in INPUTS.items() if name != "labels"}
    for name in ("token", "sequence"):
        actual, expected = (heads[name](**flipped).logits for heads in (changed, reference))
        real = flipped["attention_mask"].bool() if name == "token" else slice(None)
        assert_near([actual[real]], [expected[real]], what=name)


def test_a_replaced_loss_of_the_wrapper_is_a_change() -> None:
    model = HuggingFaceModel(tiny_bert(), use_logits=True)
    model.loss = lambda outputs, batch: outputs["loss"]  # type: ignore[method-assign]
    assert changes_to(model) == ["the model has its own loss"]


# Parameters.


def test_tied_shared_and_frozen_parameters() -> None:
    def shared(model: Any) -> Any:
        first, second = model.bert.encoder.layer
        second.attention.self.query = first.attention.self.query  # one module in two layers
        second.output.dense.weight = first.output.dense.weight
        model.bert.embeddings.requires_grad_(False)
        first.intermediate.requires_grad_(False)
        return model

    assert_same(apply_both(shared(tiny_bert())), shared(tiny_bert()))


def test_gradient_hooks_of_parameters_run() -> None:
    models = apply_both(tiny_bert()), tiny_bert()
    for model in models:
        for parameter in model.bert.encoder.layer[0].parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
    assert_same(*models)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_recomputes_the_same(reentrant: bool) -> None:
    """Dropout is on; the recomputation must use the same masks."""
    model = apply_both(tiny_bert(dropout=0.3)).train()
    results = []
    for enabled in (True, False):
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        else:
            model.gradient_checkpointing_disable()
        model.zero_grad()
        torch.manual_seed(9)
        model(**INPUTS).loss.backward()
        results.append(gradients(model))
        assert [layer.ran for layer in layers_of(model)] == ["torch", "first tokens"]
    assert_near(results[0], results[1])


class Quantized(Tensor):
    """A tensor subclass, like those of torchao."""


@pytest.mark.parametrize("weight", [torch.zeros(32, 32, dtype=torch.int8), torch.zeros(32, 32).as_subclass(Quantized)])
def test_a_quantized_weight_is_not_fused(weight: Tensor) -> None:
    model = tiny_bert()
    for layer in model.bert.encoder.layer:
        layer.attention.self.value.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=r"layer\.0\.attention\.self\.value\.weight is a .* instead of a plain"):
        apply_both(model)


# Copies, files, devices, dtypes.


def test_copies_and_loaded_models_match_and_are_independent() -> None:
    model, reference = apply_both(tiny_bert()), tiny_bert()
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        assert_same(other, reference)
        assert [layer.ran for layer in layers_of(other)] == ["torch", "first tokens"]
        other.bert.pooler = MeanPooler()  # must not affect the other models
    assert [layer.ran for layer in layers_of(model)] == [None, None]
    assert_same(model, reference)
    assert layers_of(model)[-1].ran == "first tokens"


def test_another_dtype_and_the_meta_device() -> None:
    model, reference = apply_both(tiny_bert()).double(), tiny_bert().double()
    assert_same(model, reference)
    half = apply_both(tiny_bert()).to(torch.bfloat16)
    logits = half(**INPUTS).logits
    assert logits.dtype == torch.bfloat16
    assert_near([logits.float()], [reference.float()(**INPUTS).logits], dtype=torch.bfloat16)
    model.to("meta")
    assert layers_of(model)[0].attention.self.query.weight.is_meta


# Undoing.


def test_undoing_restores_classes_attributes_and_hooks() -> None:
    for family in UNPADDED:
        model, reference = tiny_model(family), tiny_model(family)
        classes = [type(module) for module in model.modules()]
        state = {name: set(vars(module)) for name, module in model.named_modules()}
        unpad(model, 8)
        if family in FUSED:
            fuse(model)
        assert [type(module) for module in model.modules()] != classes
        unfuse(model)
        assert restore_encoders(model)
        assert [type(module) for module in model.modules()] == classes
        assert {name: set(vars(module)) for name, module in model.named_modules()} == state
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        assert model.config._attn_implementation == "eager"
        assert changes_to(model) == []
        inputs = {**INPUTS, "input_ids": INPUTS["input_ids"].clamp(min=2)}
        assert_same(model, reference, inputs)


def test_closing_a_trainer_restores_the_model() -> None:
    model = HuggingFaceModel(tiny_bert(), use_logits=True)
    trainer = make_trainer([Unpadding(8), FusedLayers()], model=model)
    trainer.fit()
    assert layers_of(model)
    trainer.close()
    assert changes_to(model) == []
    assert not layers_of(model)
    assert not unpadded_encoders(model)
    assert model.model.config._attn_implementation == "eager"


def test_closing_an_earlier_trainer_keeps_the_changes_of_a_later_one() -> None:
    model = HuggingFaceModel(tiny_bert(), use_logits=True)
    earlier = make_trainer([Unpadding(8), FusedLayers()], model=model)
    later = make_trainer([Unpadding(8), FusedLayers()], model=model)
    earlier.close()
    assert len(layers_of(model)) == 2
    later.fit()
    assert layers_of(model)[0].ran == "torch"
    later.close()
    assert not layers_of(model)


def test_closing_a_trainer_keeps_earlier_changes_of_the_function() -> None:
    hf = tiny_bert()
    unpad(hf)
    trained([Unpadding()], model=HuggingFaceModel(hf, use_logits=True))
    assert unpadded_encoders(hf)


def test_sdpa_after_unpadding_is_refused_and_the_model_is_unchanged() -> None:
    model = tiny_bert()
    unpad(model, 8)
    with pytest.raises(ValueError, match="unpadding has its own attention"):
        apply_sdpa_attention(model)
    assert model.config._attn_implementation == "eager"
    model(**INPUTS)
    assert unpadded_encoders(model)[0].ran == "unpadded"


def test_a_stock_model_with_a_custom_encoder_class_is_compared() -> None:
    class Wider(BertModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.pooler_output = outputs.last_hidden_state.amax(1)
            return outputs

    model = tiny_bert()
    model.bert.__class__ = Wider
    with pytest.raises(CannotRunError, match="bert is a tests Wider"):
        trained([Unpadding(8)], model=model)
