"""LoRA: trained and frozen parameters, their groups, settings, exports, and training with other techniques."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertForMaskedLM

from composer_speedups import (
    LoRA,
    apply,
    merged_state_dict,
    save_adapter,
)
from composer_speedups.algorithms.lora.modules import adapted_layers, adapter_host, trained_copies
from composer_speedups.core.errors import Refusal
from tests.helpers.common import (
    assert_not_engaged,
    awkward_batches,
    make_trainer,
    tiny_bert,
    without_labels,
)
from tests.helpers.jobs import run
from tests.helpers.models import tiny_model
from tests.reference.loop import eval_logits, gradients
from tests.reference.tolerance import assert_near


def apply_lora(model: nn.Module, optimizer: Any = None, **settings: Any) -> list[str]:
    """Apply the technique, and return the names of the adapted modules."""
    apply(model, [LoRA(**settings)], optimizer)
    return list(adapted_layers(adapter_host(model)))


def trained_bert() -> Any:
    """A tiny BERT with adapters and classifier of some size, as after training."""
    model = tiny_bert()
    apply_lora(model, rank=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if "classifier" in n], "lr": 5e-3},
            {"params": [p for n, p in named.items() if "query" in n and p.ndim > 1], "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if "embeddings" in n]},
            {"params": [p for n, p in named.items() if "key" in n]},
        ],
        lr=1e-3,
    )


@pytest.mark.pins
@pytest.mark.parametrize(
    ("family", "head", "targets", "heads"),
    [
        ("roberta", "classification", {"query", "key", "value", "dense"}, ["classifier"]),
        ("electra", "classification", {"query", "key", "value", "dense", "embeddings_project"}, ["classifier"]),
        (
            "distilbert",
            "classification",
            {"q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"},
            ["pre_classifier", "classifier"],
        ),
        ("bert", "classification", {"query", "key", "value", "dense"}, ["classifier"]),
        ("bert", "mlm", {"query", "key", "value", "dense"}, []),
    ],
)
def test_default_targets_and_heads_of_each_family(family: Any, head: Any, targets: set[str], heads: list[str]) -> None:
    model = tiny_model(family, head)
    names = apply_lora(model)
    assert apply_lora(model) == names, "a second call changes nothing"
    assert {name.split(".")[-1] for name in names} == targets
    assert not any(name.startswith(tuple(heads) or "?") or name.endswith("decoder") for name in names)
    assert list(trained_copies(model)) == heads
    assert set(merged_state_dict(model)) == set(type(model)(model.config).state_dict())


@pytest.mark.pins
def test_adapters_join_the_parameter_group_of_their_base_weight() -> None:
    model = tiny_bert()
    optimizer = two_groups(model)
    groups = list(optimizer.param_groups)
    apply_lora(model, optimizer, targets=["query", "value"])
    for _ in range(2):
        assert all(new is old for new, old in zip(optimizer.param_groups, groups, strict=True))
        named = {p: n for n, p in model.named_parameters()}
        held = [sorted({named[p].split(".")[-4] for p in g["params"] if "lora" in named[p]}) for g in groups]
        assert held == [["value"], ["query"], [], []], "value weights had no group, so their adapters join the first"
        assert [len(g["params"]) for g in groups] == [2 + 4, 4, 0, 0]
        assert groups[0]["lr"] == 5e-3
        assert groups[1]["weight_decay"] == 0.0
        apply_lora(model, optimizer, targets=["query", "value"])


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
    assert apply_lora(Plain()) == ["inner", "head"]


@pytest.mark.pins
def test_targets_that_match_nothing_are_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"targets: no Linear of the model is called 'querry'; it has .*key, query"):
        apply_lora(tiny_bert(), targets=["value", "querry"])
    with pytest.raises(ValueError, match="no Linear of the model is called 'word_embeddings'"):
        apply_lora(tiny_bert(), targets=["word_embeddings"])
    with pytest.raises(ValueError, match=r"modules_to_save: no module .* 'haed'; it has .*head, inner"):
        apply_lora(Plain(), targets="all-linear", modules_to_save=["haed"])
    untouched = tiny_bert()
    with pytest.raises(Refusal, match=r"lora: targets: no Linear .* 'q_proj'.*; remove it"):
        make_trainer([LoRA(targets=["q_proj"])], model=untouched)
    assert all(p.requires_grad for p in untouched.parameters())


def test_models_with_other_adapters_are_refused() -> None:
    model = tiny_bert()
    apply(model, [LoRA(rank=2)]).undo()  # adapters stay
    with pytest.raises(Refusal, match=r"already has LoRA's adapters with .*'r': 2.*; build a new model"):
        apply_lora(model, rank=3)
    config = model.peft_config["default"]
    with pytest.raises(Refusal, match="already has PEFT adapters; build a new model, or pass its base model"):
        make_trainer([LoRA(rank=2)], model=HuggingFaceModel(get_peft_model(tiny_bert(), config)))


@pytest.mark.pins
def test_merged_weights_give_the_same_logits_without_changing_the_model() -> None:
    model, stock, batches = trained_bert(), tiny_bert(seed=5), awkward_batches()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    expected = eval_logits(model, batches)
    stock.load_state_dict(merged_state_dict(model))
    assert_near(eval_logits(stock, batches), expected)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    untouched = torch.cat(eval_logits(tiny_bert(), batches))
    assert (torch.cat(expected) - untouched).abs().max() > 0.1, "the adapters must have an effect"
    for layer in adapted_layers(model).values():
        layer.merge()  # PEFT's; it must not be added twice
    stock.load_state_dict(merged_state_dict(model))
    assert_near(eval_logits(stock, batches), expected)


def test_adapters_in_a_model_in_eval_mode_have_no_dropout() -> None:
    """``from_pretrained`` returns a model in eval mode, into which trained adapters may be loaded."""
    model, batches = tiny_bert().eval(), awkward_batches()
    apply_lora(model, rank=4, dropout=0.5)
    model.load_state_dict(trained_bert().state_dict())
    inputs = without_labels(batches[0])
    assert_near(model(**inputs).logits, trained_bert().eval()(**inputs).logits)


@pytest.mark.pins
def test_peft_loads_the_adapter_folder_into_a_fresh_base(tmp_path: Path) -> None:
    model, batches = trained_bert(), awkward_batches()
    save_adapter(model, tmp_path / "adapter")
    save_adapter(HuggingFaceModel(model), tmp_path / "adapter")  # overwrites it, from the ComposerModel
    assert len({path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}) == 1, "all may read the weights, too"
    loaded = PeftModel.from_pretrained(tiny_bert(), str(tmp_path / "adapter"))
    assert_near(eval_logits(loaded, batches), eval_logits(model, batches))
    stock = loaded.merge_and_unload()
    assert_near(dict(stock.named_parameters()), {n: merged_state_dict(model)[n] for n, _ in stock.named_parameters()})
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_masked_lm_keeps_its_tied_head(tmp_path: Path) -> None:
    model = tiny_model("bert", "mlm").eval()
    apply_lora(model, targets="all-linear")
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight)
    ids = torch.arange(1, 9)[None]
    model.save_pretrained(tmp_path / "model", state_dict=merged_state_dict(model))
    merged = BertForMaskedLM.from_pretrained(tmp_path / "model").eval()
    assert_near([merged(ids).logits], [model(ids).logits])


def test_a_run_exports_the_merged_model_and_the_adapter() -> None:
    base = tiny_bert_folder()
    settings = ["model.size=null", "model.init=pretrained", f"model.name={base}", f"data.tokenizer={base}"]
    lora = "algorithms.lora={rank: 4, targets: [query, key, value]}"
    report = run("trainer.max_duration=4ba", "algorithms.torch_compile=null", "optimizer.lr=0.02", *settings, lora)
    evidence = report["algorithms"]["lora"]["evidence"]
    assert evidence["modules"] == 6
    weights = load_file("runs/quickstart/model/model.safetensors")
    untouched = AutoModelForSequenceClassification.from_pretrained(base)
    assert set(weights) == set(untouched.state_dict())
    merged = AutoModelForSequenceClassification.from_pretrained("runs/quickstart/model")
    config = json.loads(Path("runs/quickstart/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["task_type"]) == (4, "SEQ_CLS")
    adapted = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(config["base_model_name_or_path"]),
        "runs/quickstart/adapter",
    )
    inputs = [{k: v for k, v in b.items() if k != "labels"} for b in awkward_batches()]
    assert_near(eval_logits(adapted, inputs), eval_logits(merged, inputs))
    difference = torch.cat(eval_logits(merged, inputs)) - torch.cat(eval_logits(untouched, inputs))
    assert difference.abs().max() > 1e-3, "nothing was trained"


def tiny_bert_folder() -> Path:
    """Save a base model with a tokenizer and return its folder."""
    run("trainer.max_duration=1ba", "trainer.eval_batches=1", "algorithms=null", "run_name=base")
    return Path("runs/base/model").resolve()


@pytest.mark.pins
def test_adapters_that_are_off_or_not_in_the_optimizer_are_detected() -> None:
    trainer = make_trainer([LoRA()])
    model = copy.deepcopy(trainer.state.model)
    trainer.state.optimizers[0].param_groups[0]["params"][:] = [p for p in model.parameters() if p.requires_grad]
    assert_not_engaged(trainer, "no step changed an adapter")
    trainer = make_trainer([LoRA()])
    for layer in adapted_layers(trainer.state.model).values():
        layer.enable_adapters(False)
    for wrapper in trained_copies(trainer.state.model).values():
        wrapper.enable_adapters(False)
    trainer.state.model.model.bert.embeddings.LayerNorm.weight.requires_grad_()  # so the loss requires grad
    assert_not_engaged(trainer, "no adapter got a gradient")


def test_an_optimizer_that_was_made_before_and_not_passed_is_refused_with_the_fix() -> None:
    model = tiny_bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply(model, [LoRA()])
    batch = without_labels(awkward_batches()[0])
    model(**batch).logits.sum().backward()
    fix = re.escape("no step changed an adapter; pass apply the optimizer, or make the optimizer after it")
    with pytest.raises(Refusal, match=f"^lora: .*{fix}$"):
        optimizer.step()


def test_without_an_optimizer_adapters_that_are_off_are_refused_with_their_own_fix() -> None:
    model = tiny_bert()
    apply(model, [LoRA()])
    for layer in (*adapted_layers(model).values(), *trained_copies(model).values()):
        layer.enable_adapters(False)
    model.bert.embeddings.LayerNorm.weight.requires_grad_()  # so the loss requires grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(**without_labels(awkward_batches()[0])).logits.sum().backward()
    with pytest.raises(Refusal, match=r"^lora: .*no adapter got a gradient; do not change requires_grad"):
        optimizer.step()
