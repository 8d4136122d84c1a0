"""fused_layers on the CPU: first tokens in the last layer, changed models, adapters, 8 bits, and refusals.

tests/families compares every family, also with adapters, and tests/algorithms/test_unpadding.py every kind of mask.
"""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from torch.utils.data import DataLoader
from transformers.models.bert.modeling_bert import BertSelfOutput

from composer_speedups import FusedLayers, LoRA, TF32Matmul, Unpadding, apply, recommended
from composer_speedups.algorithms.fused_layers.fusing import float8_scales, fuse
from composer_speedups.algorithms.fused_layers.modules import FusedEmbeddings, FusedLayer
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.engaging import engage
from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run
from composer_speedups.core.stock import changes_to, model_differences
from composer_speedups.kernels.dropout import draw_seeds
from composer_speedups.packing.layout import Layout
from composer_speedups.recommendation import RECOMMENDED
from composer_speedups.train.config.load import load_config
from tests.algorithms.test_unpadding import Sabotage
from tests.conftest import ROOT
from tests.helpers.common import (
    batch,
    final_weights,
    plain_batches,
    tiny_bert,
    tiny_config,
    trained,
    without_labels,
)
from tests.helpers.models import Family, tiny_model
from tests.helpers.unpadded import compared, observed, pair, unpad_and_fuse, values
from tests.packing.test_comparison import MeanPooler
from tests.reference.loop import gradients
from tests.reference.masked_layer import slope_over_norm
from tests.reference.tolerance import assert_near

INPUTS, FULL = batch([9, 16, 3, 12]), batch([16, 16])


def loss(model: Any) -> Tensor:
    return model(**INPUTS).loss  # type: ignore[no-any-return]


def layers_of(model: nn.Module) -> list[FusedLayer]:
    return [layer for layer in model.modules() if isinstance(layer, FusedLayer)]


def ways_of(model: Any, inputs: Any = INPUTS) -> dict[str, int]:
    """How the layers ran."""
    ran = observed(lambda: model(**inputs))
    return {name: ran[name] for name in ("torch_layer", "first_tokens", "unfused_layer", "stock_layer") if ran[name]}


ALL, FIRST = {"torch_layer": 2}, {"torch_layer": 1, "first_tokens": 1}


@pytest.mark.parametrize(
    ("head", "last", "expected"),
    [("classification", "needed", FIRST), ("classification", "all", ALL), ("mlm", "needed", ALL)],
)
def test_only_under_a_classification_head_the_last_layer_computes_first_tokens_only(
    head: Any, last: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = batch([5, 0, 9])  # the label of the second row is ignored
    states: list[Tensor] = []
    scatter = Layout.scatter

    def scattered(layout: Layout, x_TH: Tensor) -> Tensor:
        states.append(scatter(layout, x_TH))
        return states[-1]

    model = tiny_model("bert", head)
    unpad(model, 8)
    fuse(model, last)
    monkeypatch.setattr(Layout, "scatter", scattered)
    with torch.no_grad():
        assert ways_of(model, inputs if head == "classification" else without_labels(inputs)) == expected
    hidden = states.pop()
    assert bool(hidden[:, 1:].any()) == (expected == ALL)  # zeros if only first tokens were computed
    assert hidden[0, 0].any()
    assert not hidden[1].any()  # a row without a token


@pytest.mark.parametrize("path", ["bert", "bert.encoder", "bert.pooler"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_later_hook_around_the_layers_reads_every_token(path: str, copied: bool) -> None:
    model, reference = unpad_and_fuse(tiny_bert()).eval(), tiny_bert().eval()
    model = copy.deepcopy(model) if copied else model
    assert ways_of(model) == FIRST
    seen: list[Tensor] = []

    def keep(_: nn.Module, given: Any, result: Any) -> None:
        seen.append(given[0] if path == "bert.pooler" else result[0])

    handles = [m.get_submodule(path).register_forward_hook(keep) for m in (model, reference)]
    assert ways_of(model) == ALL
    reference(**INPUTS)
    real = INPUTS["attention_mask"].bool()
    assert_near(seen[0][real], seen[1][real])
    handles[0].remove()
    assert ways_of(model) == FIRST


def test_after_a_failed_forward_pass_the_encoder_returns_every_token() -> None:
    model = unpad_and_fuse(tiny_bert())
    with pytest.raises(ValueError, match="one of input_ids or inputs_embeds"):
        model(attention_mask=INPUTS["attention_mask"])
    assert model.bert(**without_labels(INPUTS)).last_hidden_state[0, 1:9].any()


# Changes that both models have, and how the fused one's layers run.


class FirstTwo(nn.Module):
    """A head for RoBERTa that reads the first two slots."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.out = nn.Linear(32, 2)

    def forward(self, features: Tensor, **_: Any) -> Tensor:
        return self.out(features[:, 0] + features[:, 1])


def hooked(path: str) -> Callable[[Any], Any]:
    return lambda model: model.get_submodule(path).register_forward_hook(lambda *_: None)


def last_layer_twice(model: Any) -> None:
    model.bert.encoder.layer[0] = model.bert.encoder.layer[1]


def tied_and_frozen(model: Any) -> None:
    first, second = model.bert.encoder.layer
    second.attention.self.query = first.attention.self.query  # one module in two layers
    second.output.dense.weight = first.output.dense.weight
    model.bert.embeddings.requires_grad_(False)
    first.intermediate.requires_grad_(False)


def hooks_of_a_whole_layer(model: Any) -> None:
    model.bert.encoder.layer[0].register_forward_hook(lambda _m, _i, out: 2 * out)
    model.bert.encoder.layer[0].register_forward_pre_hook(lambda _m, args: (args[0] / 3, *args[1:]))


def hooks_of_parameters(model: Any) -> None:
    for parameter in model.bert.encoder.layer[0].parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)


# Without padding, a mean is over real tokens.
CHANGES: list[tuple[Family, Callable[[Any], Any], Any, dict[str, int]]] = [
    ("bert", lambda model: model.bert.set_submodule("pooler", MeanPooler()), FULL, ALL),
    ("roberta", lambda model: model.set_submodule("classifier", FirstTwo()), INPUTS, ALL),
    *[("bert", hooked(path), INPUTS, ALL) for path in ("bert", "bert.encoder", "bert.encoder.layer.1", "bert.pooler")],
    ("bert", last_layer_twice, INPUTS, ALL),
    ("bert", tied_and_frozen, INPUTS, FIRST),
    ("bert", hooks_of_a_whole_layer, INPUTS, FIRST),
    ("bert", hooks_of_parameters, INPUTS, FIRST),
]


@pytest.mark.parametrize(("family", "change", "inputs", "ran"), CHANGES)
def test_a_change_that_leaves_the_layers_code_is_respected(family: Family, change: Any, inputs: Any, ran: Any) -> None:
    models = tiny_model(family), tiny_model(family)
    for model in models:
        change(model)
    unpad_and_fuse(models[1])
    assert compared(models[0], models[1], lambda model: model(**inputs).loss) == "packed"
    assert ways_of(models[1], inputs) == ran


@pytest.mark.parametrize("submodule", ["attention.self", "attention.output", "output", "output.dropout"])
def test_dropout_follows_the_mode_of_each_submodule(submodule: str) -> None:
    models: Any = tiny_bert(dropout=0.5).train(), tiny_bert(dropout=0.5).train()
    for model in models:
        model.bert.embeddings.eval()
        model.dropout.eval()
        for layer in model.bert.encoder.layer:
            for name in ("attention.self", "attention.output", "output"):
                layer.get_submodule(name).eval()
            layer.get_submodule(submodule).train()
    unpad_and_fuse(models[1])
    assert not torch.equal(models[1](**INPUTS).logits, models[1](**INPUTS).logits)
    for model in models:
        for layer in model.bert.encoder.layer:
            layer.get_submodule(submodule).eval()
    assert models[1].bert.encoder.layer[0].training
    compared(models[0], models[1], loss)


@pytest.mark.parametrize("site", ["attention.self.dropout", "attention.output.dropout", "output.dropout"])
def test_first_tokens_have_the_same_dropout_masks_in_both_passes(site: str) -> None:
    """tests/algorithms/test_unpadding.py compares the dropout of whole layers with that of the untouched model."""
    model = unpad_and_fuse(tiny_bert()).double().train()
    model.config.problem_type = "single_label_classification"
    assert torch.equal(loss(model), loss(model))
    model.bert.encoder.layer[1].get_submodule(site).p = 0.5
    assert len({float(loss(model).detach()) for _ in range(4)}) == 4
    assert ways_of(model) == FIRST
    assert slope_over_norm(lambda: loss(model), [*model.parameters()], 5, 1e-5) == pytest.approx(1, abs=1e-4)


def test_every_site_of_every_layer_draws_its_own_seed() -> None:
    """A constant seed would drop the same elements in every layer and step."""
    device = torch.device("cpu")
    assert len({int(seed) for _ in range(4) for seed in draw_seeds(3, device, dropout=True)}) == 12
    state = torch.get_rng_state()
    assert [int(seed) for seed in draw_seeds(3, device, dropout=False)] == [0, 0, 0]
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_recomputes_the_same(reentrant: bool, fused: bool) -> None:
    """Dropout is on; the recomputation must use the same masks."""
    model = tiny_bert(dropout=0.3).train()
    unpad(model, 8)
    if fused:
        fuse(model)
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
    assert_near(results[0], results[1])


def test_copies_loaded_models_other_dtypes_and_inference() -> None:
    reference, model = pair(apply=unpad_and_fuse)
    with torch.inference_mode():
        assert_near([model(**INPUTS).logits.clone()], [reference(**INPUTS).logits.clone()])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), model):
        assert compared(reference, other, loss) == "packed"
        assert ways_of(other) == FIRST
        other.bert.pooler = MeanPooler()  # must not affect the other models
    _, double = pair(apply=unpad_and_fuse)
    compared(reference.double(), double.double(), loss)


# Layers and adapters that are refused.


class Quantized(Tensor):
    """A tensor subclass, like those of torchao."""


def own_forward(layer: Any) -> None:
    stock = layer.output.forward
    layer.output.forward = lambda hidden, residual: 2 * stock(hidden, residual)


def own_feed_forward(layer: Any) -> None:
    stock = layer.feed_forward_chunk
    layer.feed_forward_chunk = lambda attention_output: 2 * stock(attention_output)


def frozen_weight(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


# Function that changes a layer, and the reason why it cannot be fused.
LAYER_CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda layer: layer.set_submodule("intermediate.intermediate_act_fn", nn.ReLU()),
        r"intermediate\.intermediate_act_fn is a torch ReLU instead of a transformers GELUActivation",
    ),
    (own_forward, r"output has its own forward"),
    (own_feed_forward, r" has its own feed_forward_chunk"),
    (
        lambda layer: layer.attention.self.register_forward_hook(lambda _m, _i, out: (2 * out[0], *out[1:])),
        r"attention\.self has a forward hook",
    ),
    (
        lambda layer: layer.intermediate.dense.register_full_backward_hook(lambda _m, grads, _o: (3 * grads[0],)),
        r"intermediate\.dense has a backward hook",
    ),
    (
        lambda layer: prune.random_unstructured(layer.attention.self.query, "weight", 0.5),
        r"attention\.self\.query has a forward pre-hook",
    ),
    (
        lambda layer: layer.set_submodule("attention.self.key", nn.Linear(32, 32, bias=False)),
        r"attention\.self\.key has other parameters than its class builds \(bias\)",
    ),
    (lambda layer: setattr(layer.attention.self, "scaling", 1.0), r"attention\.self\.scaling is 1\.0 instead of"),
    *[
        (
            lambda layer, weight=weight: setattr(layer.attention.self.value, "weight", frozen_weight(weight)),
            r"value\.weight is a .* instead of a plain",
        )
        for weight in (torch.zeros(32, 32).char(), torch.zeros(32, 32).as_subclass(Quantized))
    ],
]


def adapted(model: Any, **settings: Any) -> Any:
    """Return a model of the user's own with adapters of some size, as after training."""
    torch.manual_seed(3)
    defaults: dict[str, Any] = {"target_modules": "all-linear", "r": 4, "lora_alpha": 12, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**{**defaults, **settings}))


def two_active(model: Any) -> Any:
    model.add_adapter("second", LoraConfig(target_modules=["query"], r=2, init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


def with_a_hook(model: Any) -> Any:
    query = model.base_model.model.bert.encoder.layer[0].attention.self.query
    query.lora_A["default"].register_forward_hook(lambda _m, _i, out: 2 * out)
    return model


def with_changed_layer(change: Callable[[Any], Any]) -> Any:
    model = tiny_bert()
    torch.manual_seed(4)
    change(model.bert.encoder.layer[0])
    return model


def sized(**settings: Any) -> Any:
    return type(tiny_bert())(tiny_config().from_dict({**tiny_config().to_dict(), **settings}))


FP8, TANH = {"precision": "fp8"}, {"gelu": "tanh"}
PRE_NORM: list[tuple[Family, str]] = [("modernbert", "ModernBertEncoderLayer"), ("esm", "EsmLayer")]
# Settings, the model, and why it is refused.
REFUSED: list[tuple[dict[str, Any], Callable[[], Any], str]] = [
    *[
        ({}, partial(with_changed_layer, change), rf"^fused_layers cannot fuse every layer: bert.*\.0.*{reason}")
        for change, reason in LAYER_CHANGES
    ],
    ({}, lambda: sized(hidden_act="relu"), "activation is 'relu'"),
    ({}, lambda: sized(hidden_size=24), "16, 32, 64, 128 units, and these have 12"),
    ({}, lambda: adapted(tiny_bert(), use_dora=True), "has adapters other than one plain LoRA adapter"),
    ({}, lambda: adapted(tiny_bert(), lora_bias=True), "has adapters other than one plain LoRA adapter"),
    ({}, lambda: two_active(adapted(tiny_bert())), "has adapters other than one plain LoRA adapter"),
    ({}, lambda: with_a_hook(adapted(tiny_bert())), r"query has a forward hook"),
    (
        {},
        lambda: get_peft_model(tiny_bert(), IA3Config(target_modules=["key"], feedforward_modules=[])),
        r"layer\.0\.attention\.self\.key is a peft Linear instead of a torch Linear",
    ),
    *[
        ({}, lambda family=family: adapted(tiny_model(family)), f"adapters in BERT's layers and .*, not in {layer}")
        for family, layer in PRE_NORM
    ],
    *[(TANH, partial(tiny_model, family), f"the exact GELU in {layer}, not the tanh") for family, layer in PRE_NORM],
    *[
        (FP8, partial(tiny_model, family), "supports BERT's layers and similar ones, not ")
        for family in ("modernbert", "deberta_v2", "albert", "esm", "jina_embeddings_v3")
    ],
    (FP8, partial(sized, intermediate_size=72), "multiples of 16, and the layers have 32 and 72 units"),
    (FP8, partial(sized, hidden_act="gelu_new"), "the exact GELU with precision='fp8', not the tanh form"),
]


@pytest.mark.parametrize(("settings", "build", "reason"), REFUSED)
def test_a_model_is_refused_and_not_changed(settings: dict[str, Any], build: Callable[[], Any], reason: str) -> None:
    model = build()
    unpad(model, 8)
    with pytest.raises(ValueError, match=reason):
        fuse(model, **settings)
    assert not layers_of(model)
    if isinstance(model, PeftModel):
        assert_near(values(model, INPUTS), values(build(), INPUTS))


def test_the_tanh_form_of_gelu_is_refused_where_nothing_computes_it() -> None:
    for settings, reason in (({}, "gelu: tanh needs a CUDA GPU"), ({"precision": "fp8"}, "is computed in 16 bits")):
        technique = FusedLayers(gelu="tanh", **settings)
        run = Run(torch.device("cpu"), techniques={"unpadding": Unpadding()})
        assert any(reason in refusal.reason for refusal in technique.needs(run))


# The tanh form of GELU. tests/kernels compares the products and the layer with plain PyTorch.


@pytest.mark.parametrize(
    ("family", "adapters", "settings", "by_epilogues"),
    [
        ("bert", False, {"gelu": "auto"}, True),
        ("mpnet", False, {"gelu": "auto"}, True),
        ("bert", False, {"gelu": "exact"}, False),
        ("bert", True, {"gelu": "auto"}, False),
        ("bert", True, {"gelu": "tanh"}, True),
        ("bert", False, {"gelu": "auto", "precision": "fp8"}, False),
        ("bert", False, {"gelu": "auto", "precision": "fp8", "fp8_min_width": 1024}, True),
        ("narrow", False, {"gelu": "auto"}, False),
        ("narrow", False, {"gelu": "tanh"}, True),
        ("esm", False, {"gelu": "auto"}, False),
        ("modernbert", False, {"gelu": "auto"}, False),
    ],
)
def test_auto_takes_the_tanh_form_of_gelu_where_it_is_faster(
    family: Any, adapters: bool, settings: dict[str, Any], by_epilogues: bool
) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    wide = {"hidden_size": 768, "num_attention_heads": 12}
    model: Any = tiny_model("bert") if family == "narrow" else tiny_model(family, **wide)
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["query"]))
    unpad(model)
    fuse(model, **settings)
    assert {layer.has_epilogues for layer in layers_of(model)} == {by_epilogues}
    tanh = settings["gelu"] == "tanh"
    assert {layer.approximate for layer in layers_of(model)} == {"tanh" if tanh else "none"}, "on a CPU"


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("family", ["bert", "albert"])
def test_the_tanh_form_of_gelu_matches_the_model_that_has_it(family: Family, activation: str) -> None:
    """The last layer computes first tokens."""
    stock, theirs = tiny_model(family), tiny_model(family, hidden_act=activation)  # with the same weights
    expected = values(theirs, INPUTS)
    with pytest.raises(AssertionError):
        assert_near(values(stock, INPUTS), expected)
    assert_near(values(unpad_and_fuse(theirs), INPUTS), expected)
    unpad(stock, 8)
    fuse(stock, gelu="tanh")
    assert_near(values(stock, INPUTS), expected)


def test_evidence_says_how_gelu_was_computed() -> None:
    for ran, expected in (
        ({"gelu_epilogue": 8}, "4 in matmuls' epilogues"),
        ({"gelu_epilogue": 4, "gelu_operator": 4}, "2 in matmuls' epilogues, 2 by torch's operators"),
    ):
        technique = FusedLayers(gelu="tanh")
        seen: Any = SimpleNamespace(ran=Counter({"fused_layer": 4, "packed_encoder": 2, **ran}))
        assert technique.proof(Run(torch.device("cpu"), model=tiny_bert()), seen)["gelu_ran"] == expected


@pytest.mark.parametrize(("on_gpu", "way"), [(True, "fused_layer"), (True, "torch_layer"), (False, "torch_layer")])
def test_float32_on_a_gpu_which_no_kernel_computes_is_said(on_gpu: bool, way: str) -> None:
    """In a loop of one's own, where autocast and the device are not known before."""
    model: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(is_cuda=on_gpu)]))
    seen: Any = SimpleNamespace(ran=Counter({way: 2}))
    vain = on_gpu and way == "torch_layer"
    with pytest.warns(UserWarning, match="torch computed the layers, in float32; train") if vain else nullcontext():
        assert FusedLayers().proof(Run(torch.device("cpu"), model=model), seen)["layers_ran"].startswith("2 by ")


def test_a_patched_class_and_global_hooks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="every module has a hook"):
            unpad_and_fuse(tiny_bert())
    finally:
        handle.remove()
    monkeypatch.setattr(BertSelfOutput, "forward", lambda self, a, b: a)
    with pytest.raises(ValueError, match=r"transformers BertSelfOutput\.forward was replaced in its class"):
        unpad_and_fuse(tiny_bert())


def test_missing_unpadding_is_refused() -> None:
    with pytest.raises(ValueError, match="add unpadding"):
        fuse(tiny_bert())


# Adapters.


def test_lora_leaves_a_model_that_needs_no_comparison() -> None:
    model = tiny_bert()
    apply(model, [LoRA()])
    assert changes_to(model) == []
    model.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda *_: None)
    assert changes_to(model) == ["bert.encoder.layer.0.attention.self.query has a forward hook"]


def test_prefix_tuning_matches_the_untouched_model() -> None:
    torch.manual_seed(1)
    reference = get_peft_model(tiny_bert(), PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))
    assert_near(values(unpad_and_fuse(copy.deepcopy(reference)), INPUTS), values(reference, INPUTS))


def second(model: Any) -> None:
    model.add_adapter("second", LoraConfig(target_modules=["query", "dense"], r=2, init_lora_weights=False))
    model.set_adapter("second")


def merge(model: Any) -> None:
    model.merge_adapter()


@pytest.mark.parametrize(
    ("when", "change", "ran"),
    [
        ("before", second, FIRST),
        ("after", second, FIRST),
        ("before", merge, FIRST),
        ("after", merge, FIRST),
        ("after", two_active, {"unfused_layer": 2}),
    ],
)
def test_the_adapters_of_the_moment_count(when: str, change: Any, ran: dict[str, int]) -> None:
    reference = adapted(tiny_bert())
    ours = copy.deepcopy(reference)
    for model in (ours, reference):
        if model is ours and when == "after":
            unpad_and_fuse(ours)
        torch.manual_seed(8)
        change(model)
        if model is ours and when == "before":
            unpad_and_fuse(ours)
    assert_near(values(ours, INPUTS), values(reference, INPUTS))
    assert ways_of(ours) == ran
    for model in (ours, reference):
        model.eval()
    with torch.no_grad(), ours.disable_adapter(), reference.disable_adapter():
        assert_near([ours(**INPUTS).logits], [reference(**INPUTS).logits])


def test_dropout_of_adapters_draws_the_same_masks_as_peft() -> None:
    """In rows without padding, which have as many packed tokens as slots, torch draws the same numbers."""
    reference = adapted(tiny_bert(), lora_dropout=0.4).train()
    ours = copy.deepcopy(reference)
    unpad(ours, 8)
    fuse(ours, "all")
    losses = []
    for model in (ours, ours, reference):
        torch.manual_seed(6)
        losses.append(model(**batch([8, 8])).loss)
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2])
    torch.manual_seed(7)
    assert not torch.allclose(ours(**batch([8, 8])).loss, losses[0])
    assert ways_of(ours, batch([8, 8])) == ALL


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


# Matmuls in 8 bits. tests/kernels/test_kernels.py compares the kernels and the layer with plain PyTorch.


def in_float8(model: Any) -> Any:
    """On a CPU, the layers run in torch's operators."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    unpad(model)
    fuse(model, precision="fp8")
    return model


def test_scales_are_a_buffer_outside_the_state_dict() -> None:
    stock, model = tiny_bert(), in_float8(tiny_bert())
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert [name for name, _ in model.named_buffers() if "float8" in name] == [
        f"bert.encoder.layer.{i}.float8_scales" for i in range(2)
    ]
    assert float8_scales(model).keys() == {"bert.encoder.layer.0", "bert.encoder.layer.1"}
    assert model_differences(model) == []
    inputs = batch([5, 9])
    assert_near([model(**inputs).logits], [stock(**inputs).logits])
    model.to(torch.bfloat16)
    assert {layer.float8_scales.dtype for layer in model.bert.encoder.layer} == {torch.int32}


def test_a_runs_checkpoint_has_the_scales_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    model, technique = tiny_bert(), FusedLayers(precision="fp8", fp8_min_width=0, check="never")
    monkeypatch.setattr(FusedLayers, "needs", lambda self, run: ())
    run = Run(torch.device("cpu"), model=model)
    engage(run, [technique, Unpadding(check="never")])
    model.bert.encoder.layer[0].float8_scales[3, 8] = 12345
    held = technique.state(run)
    assert held["float8_scales"][0]["bert.encoder.layer.0"][3][8] == 12345
    model.bert.encoder.layer[0].float8_scales.zero_()
    technique.load_state(run, held)
    assert float8_scales(model) == held["float8_scales"][0]
    ranks = [held["float8_scales"][0], {name: [[7] * 64] * 12 for name in held["float8_scales"][0]}]
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    technique.load_state(run, {"float8_scales": ranks})
    assert float8_scales(model) == ranks[1]
    with pytest.raises(Refusal, match="have different 8-bit layers"):
        technique.load_state(run, {"float8_scales": [{}]})
    run.undo.close()
    assert FusedLayers().state(run) == {}


def test_a_run_without_an_eight_bit_layer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedLayers, "needs", lambda self, run: ())
    with pytest.raises(Refusal, match="no layer computed in 8 bits"):
        # on a CPU, the layers run in torch's operators
        trained([FusedLayers(precision="fp8", fp8_min_width=0), Unpadding()], batches=plain_batches(2))


@pytest.mark.parametrize(("least", "in_bf16"), [(0, 0), (32, 0), (33, 2), (None, 2)])
def test_layers_narrower_than_fp8_min_width_compute_in_bf16(
    least: int | None, in_bf16: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    monkeypatch.setattr(FusedLayers, "needs", lambda self, run: ())
    width = {} if least is None else {"fp8_min_width": least}
    model, technique = tiny_bert(), FusedLayers(precision="fp8", check="never", **width)
    run = Run(torch.device("cpu"), model=model)
    engage(run, [technique, Unpadding(check="never")])
    assert [layer.precision for layer in layers_of(model)] == ["bf16" if in_bf16 else "fp8"] * 2
    assert [hasattr(layer, "float8_scales") for layer in layers_of(model)] == [not in_bf16] * 2
    assert technique.matmul_precision == (None if in_bf16 else "fp8")
    assert technique._compiling is None, "there is no GPU to compile for"
    assert bool(technique.state(run)) == (not in_bf16)
    note = f"2 of 2 layers compute in bf16: their hidden size 32 is below fp8_min_width={least or 512}"
    assert technique.evidence == {"layers": 2, **({"bf16_layers": 2, "note": note} if in_bf16 else {})}
    run.undo.close()


def test_a_narrow_model_trains_with_fp8_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not refused for having no 8-bit layer, nor for widths that only 8-bit matmuls need."""
    monkeypatch.setattr(FusedLayers, "needs", lambda self, run: ())
    technique = FusedLayers(precision="fp8")
    trained([technique, Unpadding()], model=sized(intermediate_size=72), batches=plain_batches(2))
    assert technique.evidence["bf16_layers"] == 2
    assert technique.evidence["layers_ran"] == "1 for first tokens, 1 by torch"


# Evidence and settings.


def test_runs_of_the_stock_layers_are_detected() -> None:
    technique = FusedLayers(on_unavailable="warn")
    with pytest.warns(UserWarning, match="continuing although"):
        trained([technique, Unpadding(on_unavailable="warn"), Sabotage("outputs")], batches=plain_batches(2))
    assert technique.engaged is False
    assert "ran the stock model's code" in technique.evidence["unavailable"]


def test_the_recommended_set_equals_those_of_the_fast_yamls() -> None:
    for name in ("bert_imdb_fast", "fastest_imdb"):
        algorithms = load_config(ROOT / "yamls" / f"{name}.yaml").algorithms
        assert {name: dict(settings or {}) for name, settings in algorithms.items()} == RECOMMENDED
    techniques = recommended("warn")
    assert sorted(technique.name for technique in techniques) == sorted(RECOMMENDED)
    assert isinstance(techniques[1], TF32Matmul)
    assert recommended("warn")[0] is not techniques[0]
    assert {t.on_unavailable for t in techniques} == {"warn"}


@pytest.mark.parametrize("workers", [0, 2])
def test_compiling_ends_before_workers_are_forked(workers: int) -> None:
    technique: Any = FusedLayers()
    closed: list[bool] = []
    run: Any = SimpleNamespace(
        state=SimpleNamespace(train_dataloader=DataLoader(plain_batches(1), num_workers=workers))
    )
    technique.fit_start(run)  # no thread compiles
    technique._compiling = SimpleNamespace(close=lambda: closed.append(True))
    technique.fit_start(run)
    assert closed == [True] * (workers > 0)


def test_the_embedding_kernel_runs_only_without_other_arguments() -> None:
    model = unpad_and_fuse(tiny_bert()).bfloat16()
    (embeddings,) = (module for module in model.modules() if isinstance(module, FusedEmbeddings))
    ids: Any = SimpleNamespace(is_cuda=True)
    for others, expected in [
        ({}, True),
        ({"past_key_values_length": 0, "inputs_embeds": None}, True),
        ({"past_key_values_length": 1}, False),
        ({"inputs_embeds": torch.zeros(1)}, False),
    ]:
        assert embeddings._can_run(ids, others) == expected
    assert not embeddings._can_run(SimpleNamespace(is_cuda=False), {})  # type: ignore[arg-type]
