"""fused_layers on the CPU: torch's operators, first tokens in the last layer, changed parameters, and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig

from composer_speedups import FusedLayers, TF32Matmul, Unpadding, recommended
from composer_speedups.algorithms.fused_layers.fusing import fuse, unfused_layers
from composer_speedups.algorithms.fused_layers.modules import FusedEmbeddings, FusedLayer
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from composer_speedups.core.stock import Untouched
from composer_speedups.packing import encoder as packed_encoder
from composer_speedups.recommendation import RECOMMENDED
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.common import batch, make_trainer, plain_batches, tiny_bert, tiny_config, trained, without_labels
from tests.helpers.exhaustive import family_params
from tests.helpers.masks import masked_batch, random_masks, real_logits
from tests.helpers.models import FUSED, HEADS, Family, tiny_model
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near


def fused(model: Any, last_layer: Any = "needed") -> Any:
    copied = copy.deepcopy(model)
    unpad(copied)
    assert fuse(copied, last_layer)
    return copied


def layers_of(model: nn.Module) -> list[FusedLayer]:
    return [layer for layer in model.modules() if isinstance(layer, FusedLayer)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", family_params(FUSED))
def test_outputs_and_gradients_match_the_untouched_model(family: Any, head: Any) -> None:
    model = tiny_model(family, head)
    ours = fused(model)
    for seed, mask in enumerate(random_masks(20)):
        inputs = masked_batch(mask, head, seed=seed)
        for network in (model, ours):
            network.zero_grad()
        expected, actual = model(**inputs), ours(**inputs)
        expected.loss.backward()
        actual.loss.backward()
        assert_near(real_logits(actual, mask), real_logits(expected, mask), what="logits")
        assert_near(gradients(ours), gradients(model), what="gradients")
    ran = [layer.ran for layer in layers_of(ours)]
    assert set(ran) <= {"torch", "first tokens", "stock"}
    assert "torch" in ran or ran[-1] in ("first tokens", "stock")


def test_only_under_a_classification_head_the_last_layer_computes_first_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = batch([5, 0, 9])  # the label of the second row is ignored
    last_states: list[torch.Tensor] = []
    scatter = packed_encoder.scatter_tokens

    def scattered(*arguments: Any, **settings: Any) -> torch.Tensor:
        last_states.append(scatter(*arguments, **settings))
        return last_states[-1]

    monkeypatch.setattr(packed_encoder, "scatter_tokens", scattered)
    for head, last, expected in [
        ("classification", "needed", "first tokens"),
        ("classification", "all", "torch"),
        ("mlm", "needed", "torch"),
    ]:
        model = fused(tiny_model("bert", head), last)  # type: ignore[arg-type]
        with torch.no_grad():
            model(**(inputs if head == "classification" else without_labels(inputs)))
        hidden = last_states.pop().view(3, 9, -1)
        assert [layer.ran for layer in layers_of(model)] == ["torch", expected]
        assert bool(hidden[:, 1:].any()) == (expected == "torch")  # zeros if only first tokens were computed
        assert hidden[0, 0].any()
        assert not hidden[1].any()  # a row without a token


def test_missing_unpadding_and_unsupported_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="add unpadding"):
        fuse(tiny_bert())
    relu = AutoModelForSequenceClassification.from_config(tiny_config(hidden_act="relu"))
    unpad(relu)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        fuse(relu)
    odd = BertConfig(vocab_size=64, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = AutoModelForSequenceClassification.from_config(odd)
    unpad(model)
    with pytest.raises(ValueError, match="16, 32, 64, 128 units, and these have 12"):
        fuse(model)
    with pytest.raises(TechniqueError, match="fused_layers: it needs packed tokens, and nothing packs them"):
        make_trainer([FusedLayers()])


def test_evidence_says_how_each_layer_ran() -> None:
    technique = FusedLayers()
    trained([technique, Unpadding()], batches=plain_batches(2))
    assert technique.evidence == {"layers": 2, "layers_ran": "1 first tokens, 1 torch", "embeddings_ran": "stock"}


class NoAttention(Algorithm):
    """Replace the layers by identities that report ``ran``, so PyTorch sees no attention operator."""

    def __init__(self, ran: str) -> None:
        self.ran = ran

    def match(self, event: Event, state: State) -> bool:
        return event == Event.FIT_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        def forward(layer: FusedLayer, hidden: Any) -> Any:
            layer.ran = self.ran
            return hidden

        for layer in layers_of(state.model):
            layer.forward = lambda hidden, *_, layer=layer, **__: forward(layer, hidden)  # type: ignore


def test_unpadding_accepts_the_fused_layers_own_attention() -> None:
    unpadding = Unpadding()
    trained([NoAttention("triton"), FusedLayers("all"), unpadding])
    assert unpadding.evidence["attention"] == "fused_layers' own"
    with pytest.raises(NotEngagedError, match="no variable-length attention ran"):
        trained([NoAttention("torch"), FusedLayers("all"), Unpadding()])


def test_runs_of_the_stock_layers_are_detected() -> None:
    model = tiny_bert()
    technique = FusedLayers(on_unavailable="warn")
    trainer = make_trainer([technique, Unpadding(on_unavailable="warn")], batches=plain_batches(2), model=model)
    model.config.output_hidden_states = True  # the encoder then leaves every batch padded
    with pytest.warns(UserWarning, match="continuing although"):
        trainer.fit()
    trainer.close()
    assert technique.engaged is False
    assert "2 of 2 layers ran the stock model's code" in technique.evidence["unavailable"]


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
    class Compiling:
        closed = False

        def close(self) -> None:
            self.closed = True

    technique: Any = FusedLayers()
    state: Any = SimpleNamespace(train_dataloader=DataLoader(plain_batches(1), num_workers=workers))
    technique.fit_start(state)  # no thread compiles
    technique._compiling = Compiling()
    technique.fit_start(state)
    assert technique._compiling.closed == (workers > 0)


def test_the_embedding_kernel_runs_only_without_other_arguments() -> None:
    model = fused(tiny_bert()).bfloat16()
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
    embeddings.dropout = nn.Dropout(0.5)
    assert not embeddings._can_run(ids, {}), "the dropout module was replaced"


def linears(layer: nn.Module) -> list[nn.Linear]:
    return [module for module in layer.modules() if isinstance(module, nn.Linear)]


def remove_a_bias(layer: nn.Module) -> None:
    first = next(linear for linear in linears(layer) if linear.bias is not None)
    first.bias = None  # type: ignore[assignment]


def add_a_bias(layer: nn.Module) -> None:
    first = next(linear for linear in linears(layer) if linear.bias is None)
    first.bias = nn.Parameter(torch.full((first.out_features,), 0.5))


def quantize(layer: nn.Module) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization", reason="torchao quantizes the layer")
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())


def change_the_type(layer: nn.Module) -> None:
    class Subclass(nn.Parameter):
        pass

    first = linears(layer)[0]
    first.weight = Subclass(first.weight.detach() * 2)


CHANGES = [remove_a_bias, quantize, change_the_type]


@pytest.mark.filterwarnings(
    "ignore:.*Deprecation.*torchao:UserWarning", "ignore:Config Deprecation:UserWarning"
)  # torchao's own
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", family_params(FUSED))
def test_a_layer_whose_parameters_change_runs_its_own_forward(
    family: Family, change: Callable[[nn.Module], None]
) -> None:
    if family == "modernbert" and change is remove_a_bias:
        change = add_a_bias  # its layers have none
    model = tiny_model(family).eval()
    ours = copy.deepcopy(model)
    unpad(ours)
    fuse(ours, "all")
    for network in (model, ours):
        layers = [m for m in network.modules() if type(m) is type(layer_of(network))]
        change(layers[0])
    fused = [module for module in ours.modules() if isinstance(module, FusedLayer)]
    inputs = batch([6, 9, 3])
    del inputs["labels"]
    with torch.no_grad():
        assert_near([ours(**inputs).logits], [model(**inputs).logits])
    expected = ["unfused"] if family == "albert" else ["unfused", "torch"]  # ALBERT's only layer runs twice
    assert [layer.ran for layer in fused] == expected
    (reason,) = unfused_layers(ours).values()
    assert not reason.endswith("was changed"), "it says what was"


def layer_of(model: nn.Module) -> nn.Module:
    """The first block of the model's encoder."""
    return next(m[0] for m in model.modules() if isinstance(m, nn.ModuleList))


@pytest.mark.parametrize("family", family_params(FUSED))
def test_what_training_does_to_parameters_is_no_change(family: Family) -> None:
    model = tiny_model(family)
    unpad(model)
    fuse(model)
    fused = [module for module in model.modules() if isinstance(module, FusedLayer)]
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    for layer in fused:
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
    model.double().float()
    assert all(layer.untouched.is_unchanged() for layer in fused)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = [module for module in copied.modules() if isinstance(module, FusedLayer)]
        assert all(layer.untouched.is_unchanged() for layer in again)
        linears(again[0])[0].weight = None
        assert [layer.untouched.is_unchanged() for layer in (again[0], fused[0])] == [False, True], (
            "a copy looks at itself"
        )


def test_shards_of_fsdp_are_no_change() -> None:
    """Outside of the forward pass FSDP's parameters are DTensors, whose class replaces nn.Parameter."""
    layer = nn.Sequential(nn.Linear(2, 2))
    untouched = Untouched.inside(layer)
    untouched._types = [DTensor, DTensor]  # as if the snapshot had been taken of the shards
    assert untouched.is_unchanged()
    untouched._types = [DTensor]
    assert not untouched.is_unchanged()


def test_an_embedding_without_its_norms_bias_runs_the_stock_code() -> None:
    model = tiny_bert()
    unpad(model)
    fuse(model)
    embeddings: Any = model.bert.embeddings
    assert embeddings.untouched.is_unchanged()
    embeddings.LayerNorm.bias = None
    assert not embeddings.untouched.is_unchanged()
