"""fused_layers on the CPU: torch's operators, first tokens in the last layer, changed layers, heads, and refusals."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig
from transformers.models.bert.modeling_bert import BertSelfOutput

from composer_speedups import FusedLayers, TF32Matmul, Unpadding, recommended
from composer_speedups.algorithms.fused_layers.fusing import fuse, unfuse
from composer_speedups.algorithms.fused_layers.modules import FusedEmbeddings, FusedLayer
from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.core.errors import Refusal
from composer_speedups.core.stock import changes_to
from composer_speedups.packing.layout import Layout
from composer_speedups.recommendation import RECOMMENDED
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.common import batch, make_trainer, plain_batches, tiny_bert, tiny_config, trained, without_labels
from tests.helpers.exhaustive import family_params
from tests.helpers.masks import masked_batch, random_masks
from tests.helpers.models import FAMILIES, FUSED, HEADS, UNPADDED, tiny_model
from tests.helpers.unpadded import compared, observed, pair, unpad_and_fuse, values, way
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

INPUTS = batch([9, 16, 3, 12])


def loss(inputs: Any = INPUTS) -> Callable[[Any], Tensor]:
    return lambda model: model(**inputs).loss


def layers_of(model: nn.Module) -> list[FusedLayer]:
    return [layer for layer in model.modules() if isinstance(layer, FusedLayer)]


def ways(ran: Any) -> dict[str, int]:
    """How the layers ran."""
    return {name: ran[name] for name in ("torch_layer", "first_tokens", "unfused_layer", "stock_layer") if ran[name]}


def ways_of(model: Any, inputs: Any = INPUTS) -> dict[str, int]:
    return ways(observed(lambda: model(**inputs)))


ALL, FIRST = {"torch_layer": 2}, {"torch_layer": 1, "first_tokens": 1}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", family_params(FUSED))
def test_outputs_and_gradients_match_the_untouched_model(family: Any, head: Any) -> None:
    reference, model = pair(family, head, 64, apply=unpad_and_fuse)
    for seed, mask in enumerate(random_masks(20)):
        inputs = masked_batch(mask, head, seed=seed)
        assert_near(values(model, inputs), values(reference, inputs), what=f"seed {seed}")


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


def test_a_call_of_the_base_model_returns_every_token() -> None:
    for family in FAMILIES:
        reference, model = pair(family, apply=unpad_and_fuse)
        inputs, mask = without_labels(INPUTS), INPUTS["attention_mask"].bool()
        for _ in range(2):
            states = [m.eval().base_model(**inputs).last_hidden_state[mask] for m in (model, reference)]
            assert_near([states[0]], [states[1]], what=family)
            assert ways_of(model, inputs) == FIRST  # through the head


def test_after_a_failed_forward_pass_the_encoder_returns_every_token() -> None:
    model = unpad_and_fuse(tiny_bert())
    with pytest.raises(ValueError, match="one of input_ids or inputs_embeds"):
        model(attention_mask=INPUTS["attention_mask"])
    assert model.bert(**without_labels(INPUTS)).last_hidden_state[0, 1:9].any()


# Heads, poolers and hooks that read the last layer.


class MeanPooler(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.mean(1)


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


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("bert", lambda model: model.bert.set_submodule("pooler", MeanPooler())),
        ("roberta", lambda model: model.set_submodule("classifier", FirstTwo())),
        *[("bert", hooked(path)) for path in ("bert", "bert.encoder", "bert.encoder.layer.1", "bert.pooler")],
    ],
)
def test_what_could_read_other_tokens_of_the_last_layer_gets_them(family: Any, change: Any) -> None:
    models = tiny_model(family), tiny_model(family)
    for model in models:
        change(model)
    full = batch([16, 16])  # without padding, a mean is over real tokens
    unpad_and_fuse(models[1])
    assert compared(models[0], models[1], loss(full)) == "packed"
    assert ways_of(models[1], full) == ALL


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


@pytest.mark.parametrize("change", [last_layer_twice, tied_and_frozen, hooks_of_a_whole_layer, hooks_of_parameters])
def test_what_does_not_change_a_layers_code_is_respected(change: Any) -> None:
    models = tiny_bert(), tiny_bert()
    for model in models:
        change(model)
    assert compared(models[0], unpad_and_fuse(models[1]), loss()) == "packed"
    assert set(ways_of(models[1])) <= {"torch_layer", "first_tokens"}


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
    (
        lambda layer: layer.set_submodule("intermediate", OwnIntermediate(layer.intermediate)),
        r"intermediate is a tests OwnIntermediate",
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
        lambda layer: parametrize.register_parametrization(layer.output.dense, "weight", Doubled()),
        r"output\.dense is a torch ParametrizedLinear",
    ),
    (
        lambda layer: layer.set_submodule("output.LayerNorm", nn.RMSNorm(32, eps=1e-6)),
        r"output\.LayerNorm is a torch RMSNorm instead of a torch LayerNorm",
    ),
    (
        lambda layer: layer.set_submodule("attention.self.key", nn.Linear(32, 32, bias=False)),
        r"attention\.self\.key has other parameters than its class builds \(bias\)",
    ),
    (lambda layer: setattr(layer.attention.self, "scaling", 1.0), r"attention\.self\.scaling is 1\.0 instead of"),
    (
        lambda layer: setattr(layer.attention.self.value, "weight", frozen_weight(torch.zeros(32, 32).char())),
        r"value\.weight is a .* instead of a plain",
    ),
    (
        lambda layer: setattr(
            layer.attention.self.value, "weight", frozen_weight(torch.zeros(32, 32).as_subclass(Quantized))
        ),
        r"value\.weight is a .* instead of a plain",
    ),
]


@pytest.mark.parametrize(("change", "reason"), LAYER_CHANGES)
def test_a_model_with_a_changed_layer_is_refused_and_not_changed(change: Any, reason: str) -> None:
    model = tiny_bert()
    torch.manual_seed(4)
    change(model.bert.encoder.layer[0])
    unpad(model, 8)
    with pytest.raises(ValueError, match=rf"^fused_layers cannot fuse every layer: bert\.encoder\.layer\.0.*{reason}"):
        fuse(model)
    assert not layers_of(model)


def test_a_patched_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BertSelfOutput, "forward", lambda self, a, b: a)
    with pytest.raises(ValueError, match=r"transformers BertSelfOutput\.forward was replaced in its class"):
        unpad_and_fuse(tiny_bert())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LoraConfig(target_modules=["query"], use_dora=True), "has adapters other than one plain LoRA adapter"),
        (IA3Config(target_modules=["key"], feedforward_modules=[]), "is a peft Linear instead of a torch Linear"),
    ],
)
def test_adapters_other_than_plain_lora_are_refused_and_train_unpadded(config: Any, reason: str) -> None:
    torch.manual_seed(1)
    model = get_peft_model(tiny_bert(), config)
    reference = copy.deepcopy(model)
    unpad(model, 8)
    with pytest.raises(ValueError, match=rf"layer\.0\.attention\.self\.\w+ {reason}"):
        fuse(model)
    assert compared(reference, model, loss()) == "packed"


def test_prefix_tuning_matches_the_untouched_model() -> None:
    torch.manual_seed(1)
    reference = get_peft_model(tiny_bert(), PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))
    compared(reference, unpad_and_fuse(copy.deepcopy(reference)), loss())


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
    compared(models[0], models[1], loss())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_recomputes_the_same(reentrant: bool) -> None:
    """Dropout is on; the recomputation must use the same masks."""
    model = unpad_and_fuse(tiny_bert(dropout=0.3)).train()
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
        assert compared(reference, other, loss()) == "packed"
        assert ways_of(other) == FIRST
        other.bert.pooler = MeanPooler()  # must not affect the other models
    _, double = pair(apply=unpad_and_fuse)
    compared(reference.double(), double.double(), loss())


def test_undoing_restores_classes_attributes_and_hooks() -> None:
    for family in UNPADDED:
        model = tiny_model(family)
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
        assert model.config._attn_implementation == "eager"
        assert changes_to(model) == []


def test_closing_a_trainer_restores_the_model() -> None:
    model = HuggingFaceModel(tiny_bert(), use_logits=True)
    trainer = make_trainer([Unpadding(8), FusedLayers()], model=model)
    trainer.fit()
    assert layers_of(model)
    trainer.close()
    assert changes_to(model) == []
    assert way(observed(lambda: model(INPUTS))) == "not at all"


# Refusals and evidence.


def test_missing_unpadding_and_unsupported_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="add unpadding"):
        fuse(tiny_bert())
    relu = AutoModelForSequenceClassification.from_config(tiny_config(hidden_act="relu"))
    odd = BertConfig(vocab_size=64, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    for model, reason in (
        (relu, "activation is 'relu'"),
        (AutoModelForSequenceClassification.from_config(odd), "16, 32, 64, 128 units, and these have 12"),
    ):
        with pytest.raises(ValueError, match=reason):
            unpad_and_fuse(model)
    with pytest.raises(Refusal, match="fused_layers: it needs packed tokens, and nothing packs them"):
        make_trainer([FusedLayers()])


def test_evidence_says_how_each_layer_ran() -> None:
    technique = FusedLayers()
    trained([technique, Unpadding()], batches=plain_batches(2))
    ran = {"layers_ran": "1 for first tokens, 1 by torch", "embeddings_ran": "by the stock code"}
    assert technique.evidence == {"layers": 2, **ran}


class StockLayers(Algorithm):
    """Requests hidden states, so that the encoder leaves every batch padded."""

    def match(self, event: Event, state: State) -> bool:
        return event == Event.FIT_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.model.model.config.output_hidden_states = True


def test_runs_of_the_stock_layers_are_detected() -> None:
    technique = FusedLayers(on_unavailable="warn")
    with pytest.warns(UserWarning, match="continuing although"):
        trained([technique, Unpadding(on_unavailable="warn"), StockLayers()], batches=plain_batches(2))
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
