"""LoRA: checkpoints, the merged model, and adapters in PEFT's format."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from composer.models import HuggingFaceModel
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

from composer_speedups import LoRA, apply_lora, merged_state_dict, save_adapter
from composer_speedups.algorithms.lora.adapters import adapted_layers
from tests.helpers.adapters import QUERIES_AND_VALUES, TINY, trained_bert
from tests.helpers.common import awkward_batches, final_weights, tiny_bert, trained
from tests.helpers.jobs import run
from tests.reference.loop import eval_logits
from tests.reference.tolerance import assert_near


@pytest.mark.pins
def test_a_checkpoint_has_base_adapters_and_classifier(tmp_path: Path) -> None:
    trainer = trained([LoRA()], save_folder=str(tmp_path), save_interval="4ba", save_filename="end.pt")
    saved = torch.load(tmp_path / "end.pt", weights_only=False)["state"]["model"]
    torch.testing.assert_close({n: saved[n] for n in final_weights(trainer)}, final_weights(trainer), rtol=0, atol=0)
    assert "model.classifier.modules_to_save.default.weight" in saved
    assert f"model.{QUERIES_AND_VALUES[0]}.base_layer.weight" in saved


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


def test_merged_weights_equal_pefts() -> None:
    ours, theirs = trained_bert(), copy.deepcopy(trained_bert())
    for layer in adapted_layers(theirs).values():
        layer.merge()
    merged = merged_state_dict(ours)
    assert_near(
        {n: merged[f"{n}.weight"] for n in adapted_layers(theirs)},
        {n: layer.get_base_layer().weight.data for n, layer in adapted_layers(theirs).items()},
    )


@pytest.mark.pins
def test_peft_loads_the_adapter_folder_into_a_fresh_base(tmp_path: Path) -> None:
    model, batches = trained_bert(), awkward_batches()
    save_adapter(model, tmp_path / "adapter")
    save_adapter(HuggingFaceModel(model), tmp_path / "adapter")  # overwrites it, from the ComposerModel
    loaded = PeftModel.from_pretrained(tiny_bert(), str(tmp_path / "adapter"))
    assert_near(eval_logits(loaded, batches), eval_logits(model, batches))
    stock = loaded.merge_and_unload()
    assert_near(dict(stock.named_parameters()), {n: merged_state_dict(model)[n] for n, _ in stock.named_parameters()})
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_masked_lm_keeps_its_tied_head(tmp_path: Path) -> None:
    model = BertForMaskedLM(BertConfig(**TINY, intermediate_size=64)).eval()
    apply_lora(model, targets="all-linear")
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight)
    ids = torch.arange(1, 9)[None]
    model.save_pretrained(tmp_path / "model", state_dict=merged_state_dict(model))
    save_adapter(model, tmp_path / "adapter")
    merged = BertForMaskedLM.from_pretrained(tmp_path / "model").eval()
    assert_near([merged(ids).logits], [model(ids).logits])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["auto_mapping"]["base_model_class"] == "BertForMaskedLM"


def test_a_run_exports_the_merged_model_and_the_adapter() -> None:
    base = tiny_bert_folder()
    settings = ["model.size=null", "model.init=pretrained", f"model.name={base}", f"data.tokenizer={base}"]
    lora = "algorithms.lora={rank: 4, targets: [query, key, value]}"
    report = run("trainer.max_duration=4ba", "algorithms.torch_compile=null", "optimizer.lr=0.02", *settings, lora)
    evidence = report["algorithms"]["lora"]["evidence"]
    assert (evidence["modules"], evidence["base_unchanged"]) == (6, True)
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


def test_the_adapter_of_a_random_base_names_no_base_model() -> None:
    run("trainer.max_duration=1ba", "trainer.eval_batches=1", "algorithms={lora: {}}")
    config = json.loads(Path("runs/quickstart/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None
