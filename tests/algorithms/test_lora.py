"""LoRA: trained and frozen parameters, their parameter groups, and settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from peft import get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from composer_speedups import (
    ForEachOptimizer,
    FusedOptimizer,
    LoRA,
    apply_lora,
    merged_state_dict,
    save_adapter,
)
from composer_speedups.algorithms.lora.adapters import trained_copies
from composer_speedups.core.errors import ConfigError, TechniqueError
from composer_speedups.core.registry import build_techniques
from tests.helpers.adapters import QUERIES_AND_VALUES, TINY, two_groups
from tests.helpers.common import awkward_batches, make_trainer, tiny_bert
from tests.reference.loop import eval_logits, gradients
from tests.reference.tolerance import assert_near


@pytest.mark.pins
def test_outputs_are_kept_and_only_adapters_and_classifier_have_gradients() -> None:
    reference, model = tiny_bert(), tiny_bert()
    assert apply_lora(model) == QUERIES_AND_VALUES
    assert apply_lora(model) == []
    assert type(model) is type(reference)
    batches = awkward_batches()
    assert_near(eval_logits(model, batches), eval_logits(reference, batches))
    for each in (reference, model):
        each(**batches[0]).loss.backward()
    expected, got = gradients(reference), gradients(model)
    assert_near(got["classifier.modules_to_save.default.weight"], expected["classifier.weight"])
    # The adapter's output is 2 · B A x, so dL/dB = 2 · (dL/dW) Aᵀ, and the reference has dL/dW.
    name = QUERIES_AND_VALUES[0]
    a = dict(model.named_parameters())[f"{name}.lora_A.default.weight"]
    assert_near(got[f"{name}.lora_B.default.weight"], 2 * expected[f"{name}.weight"] @ a.T)
    assert all("lora_" in n or "modules_to_save" in n for n in got)
    assert len(got) == 2 * len(QUERIES_AND_VALUES) + 2


@pytest.mark.parametrize(
    ("model", "targets", "heads"),
    [
        (lambda: RobertaForSequenceClassification(RobertaConfig(**TINY)), {"query", "value"}, ["classifier"]),
        (lambda: ElectraForSequenceClassification(ElectraConfig(**TINY)), {"query", "value"}, ["classifier"]),
        (
            lambda: DistilBertForSequenceClassification(
                DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
            ),
            {"q_lin", "v_lin"},
            ["pre_classifier", "classifier"],
        ),
        (lambda: BertForMaskedLM(BertConfig(**TINY)), {"query", "value"}, []),
    ],
    ids=["roberta", "electra", "distilbert", "mlm"],
)
def test_default_targets_and_heads_of_each_family(model: Any, targets: set[str], heads: list[str]) -> None:
    model = model()
    names = apply_lora(model)
    assert {name.split(".")[-1] for name in names} == targets
    assert list(trained_copies(model)) == heads
    everything = apply_lora(twin := type(model)(model.config), targets="all-linear")
    assert len(everything) > len(names)
    assert not any(name.startswith(tuple(heads) or "?") or name.endswith("decoder") for name in everything)
    assert list(trained_copies(twin)) == heads
    assert set(merged_state_dict(model)) == set(type(model)(model.config).state_dict())


@pytest.mark.pins
def test_adapters_join_the_parameter_group_of_their_base_weight() -> None:
    model = tiny_bert()
    optimizer = two_groups(model)
    groups = list(optimizer.param_groups)
    weight = model.classifier.weight
    optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(weight)}
    apply_lora(model, optimizer)
    for _ in range(2):
        assert all(new is old for new, old in zip(optimizer.param_groups, groups, strict=True))
        named = {p: n for n, p in model.named_parameters()}
        held = [sorted({named[p].split(".")[-4] for p in g["params"] if "lora" in named[p]}) for g in groups]
        assert held == [["value"], ["query"], [], []], "value weights had no group, so their adapters join the first"
        assert [len(g["params"]) for g in groups] == [2 + 4, 4, 0, 0]
        assert groups[0]["lr"] == 5e-3
        assert groups[1]["weight_decay"] == 0.0
        apply_lora(model, optimizer)
    copied = model.classifier.modules_to_save["default"].weight
    assert list(optimizer.state) == [copied]
    assert optimizer.state[copied]["step"] == 3


def test_param_names_of_an_optimizer_are_updated() -> None:
    model = tiny_bert()
    optimizer = torch.optim.AdamW(model.named_parameters())
    apply_lora(model, optimizer)
    (group,) = optimizer.param_groups
    named = dict(model.named_parameters())
    assert [named[n] for n in group["param_names"]] == group["params"]
    assert all(p.requires_grad for p in group["params"])
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("technique", [None, ForEachOptimizer, FusedOptimizer])
def test_empty_parameter_groups_are_harmless(technique: Any) -> None:
    model = tiny_bert()
    composer_model = HuggingFaceModel(model, use_logits=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    lora = LoRA()
    trainer = make_trainer(
        [lora, *([technique()] if technique else [])], model=composer_model, optimizer=two_groups(model)
    )
    trainer.fit()
    trainer.close()
    assert lora.evidence["base_unchanged"]
    after = merged_state_dict(model)
    changed = {n for n, p in before.items() if not torch.equal(p, after[n])}
    assert changed == {f"{n}.weight" for n in QUERIES_AND_VALUES} | {"classifier.weight", "classifier.bias"}


def test_the_evidence_counts_trained_parameters() -> None:
    technique = LoRA(rank=4)
    trainer = make_trainer([technique])
    trainer.fit()
    trainer.close()
    stock = sum(p.numel() for p in tiny_bert().parameters())
    adapters, classifier = 4 * 2 * 4 * 32, 2 * 32 + 2
    assert technique.evidence["modules"] == technique.evidence["adapters_with_gradient"] == 4
    assert technique.evidence["trainable_parameters"] == adapters + classifier
    assert technique.evidence["total_parameters"] == stock + adapters + classifier
    assert technique.evidence["trained_whole"] == "classifier"
    held = {id(p) for group in trainer.state.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in trainer.state.model.parameters() if p.requires_grad}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(ids)).tanh())


def test_a_plain_module_with_names_or_all_linear() -> None:
    ids = torch.arange(8)
    model, reference = Plain(), Plain()
    reference.load_state_dict(model.state_dict())
    assert apply_lora(model, targets=["inner"], modules_to_save=["head"], rank=2) == ["inner"]
    assert_near([model(ids)], [reference(ids)])
    model(ids).sum().backward()
    assert set(gradients(model)) == {
        "inner.lora_A.default.weight",
        "inner.lora_B.default.weight",
        "head.modules_to_save.default.weight",
        "head.modules_to_save.default.bias",
    }
    assert set(merged_state_dict(model)) == set(reference.state_dict())
    assert apply_lora(Plain(), targets="all-linear") == ["inner", "head"]


@pytest.mark.pins
def test_targets_that_match_nothing_are_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no module is called 'querry'.*dense, key, query, value"):
        apply_lora(tiny_bert(), targets=["value", "querry"])
    with pytest.raises(ValueError, match="word_embeddings is a Embedding; only Linear"):
        apply_lora(tiny_bert(), targets=["word_embeddings"])
    with pytest.raises(ValueError, match=r"Plain models have no default targets.*head, inner"):
        apply_lora(Plain())
    with pytest.raises(ValueError, match=r"modules_to_save: the model has no module 'haed'.*inner, head"):
        apply_lora(Plain(), targets="all-linear", modules_to_save=["haed"])
    with pytest.raises(TechniqueError, match=r"lora: targets: no module is called 'q_proj'.*; remove it"):
        make_trainer([LoRA(targets=["q_proj"])])
    untouched = tiny_bert()
    with pytest.raises(ValueError, match="no module"):
        apply_lora(untouched, targets=["q_proj"])
    assert all(p.requires_grad for p in untouched.parameters())


def test_bad_settings_and_models_with_adapters_are_refused() -> None:
    wrong: Any = "linear"
    for settings, message in [
        ({"rank": 0}, "rank must be 1 to 4096"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"dropout": 1.0}, "dropout must be 0 to below 1"),
        ({"targets": wrong}, "targets must be 'all-linear' or a list"),
    ]:
        with pytest.raises(ValueError, match=message):
            LoRA(**settings)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            apply_lora(tiny_bert(), **settings)  # type: ignore[arg-type]
    model = tiny_bert()
    apply_lora(model, rank=2)
    with pytest.raises(ValueError, match="already has LoRA's adapters with rank=2; to use rank=3, build"):
        apply_lora(model, rank=3)
    config = model.peft_config["default"]
    with pytest.raises(TechniqueError, match="already has PEFT adapters; pass its base model"):
        make_trainer([LoRA(rank=2)], model=HuggingFaceModel(get_peft_model(tiny_bert(), config)))
    with pytest.raises(ValueError, match="no adapters; call apply_lora first"):
        save_adapter(tiny_bert(), "adapter")


def test_the_yaml_accepts_lists_of_names() -> None:
    (technique,) = build_techniques({"lora": {"targets": ["query"], "rank": 2}})
    assert repr(technique) == "LoRA(rank=2, alpha=16.0, targets=['query'], dropout=0.0, modules_to_save=None)"
    with pytest.raises(ConfigError, match=r"lora.targets must be 'all-linear' or a list of text or null, not 'query'"):
        build_techniques({"lora": {"targets": "query"}})
    with pytest.raises(ConfigError, match=r"lora.targets must be .*, not \[1\]"):
        build_techniques({"lora": {"targets": [1]}})
