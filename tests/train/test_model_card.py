"""The card of an exported model: metadata that the hub reads, data without paths, metrics, techniques, versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from composer_speedups.core.errors import NotRecordedError
from composer_speedups.train.model_card import model_card
from tests.helpers.jobs import run

BRIEF = ["trainer.max_duration=2ba", "trainer.eval_batches=1", "run_name=done"]


def read(text: str) -> Any:
    """The metadata of a card, as the hub's library reads it."""
    return ModelCard(text).data


def changed(report: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """A report with other values in sections of its config."""
    config = {**report["config"], **{name: {**report["config"][name], **new} for name, new in sections.items()}}
    return {**report, "config": config}


def test_an_exported_model_has_a_card_of_its_report() -> None:
    report = run(*BRIEF, "algorithms.unpadding={}", "algorithms.sdpa_attention=null")
    text = Path("runs/done/model/README.md").read_text()
    modes = {path.stat().st_mode for path in Path("runs/done/model").iterdir()}
    assert len(modes) == 1, "whoever may read the configuration may read the weights"
    data = read(text)
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-classification")
    assert (data.base_model, data.datasets, data.eval_results) == (None, None, None)
    assert f"| accuracy | {report['metrics']['accuracy']:.6g} |" in text
    assert "train_accuracy" in report["metrics"]
    assert "train_" not in text, "of a last batch, which may have two samples"
    for name, values in report["classes"]["classes"].items():
        precision = "–" if values["precision"] is None else f"{values['precision']:.4g}"
        assert f"| {name} | {precision} | {values['recall']:.4g} | {values['f1']:.4g} | {values['samples']} |" in text
    assert "trained from random weights" in text
    assert "built-in samples, at most 48 tokens per text." in text
    assert "AutoModelForSequenceClassification.from_pretrained" in text
    assert "\n2 batches of 8 samples (`2ba`), learning rate 0.001, seed 17.\n" in text
    for name, entry in report["algorithms"].items():
        assert f"| `{name}` | yes | {next(iter(entry['evidence']))} " in text
    for name in ("torch", "composer", "transformers", "python"):
        assert f"| {name} | {report['environment'][name]} |" in text

    hub = {"source": "hub", "hub_name": "nyu-mll/glue", "hub_config": "mrpc", "eval_split": "validation"}
    pretrained = {"init": "pretrained", "name": "google-bert/bert-base-uncased"}
    text = str(model_card(changed(report, data=hub, model=pretrained)))
    assert "the hub's dataset `nyu-mll/glue`, configuration `mrpc`, trained on `train`, validated on `val" in text
    data = read(text)
    assert (data.base_model, data.datasets) == ("google-bert/bert-base-uncased", ["nyu-mll/glue"])
    (accuracy,) = (result for result in data.eval_results if result.metric_type == "accuracy")
    assert (accuracy.metric_value, accuracy.dataset_config) == (report["metrics"]["accuracy"], "mrpc")
    assert not any(result.metric_type.startswith("train_") for result in data.eval_results)

    files = {"source": "files", "train_file": "/secret/of/mine/part-*.csv", "eval_fraction": 0.25}
    text = str(model_card(changed(report, data=files, model={"init": "pretrained", "name": "/secret/bert|x"})))
    assert "secret" not in text
    assert "files, trained on `part-*.csv`, validated on 0.25 of these samples, at most 48" in text
    assert "trained from `bert|x`" in text


def test_a_card_that_cannot_be_written_costs_neither_model_nor_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("composer_speedups.train.model_card.write_model_card", full)
    with pytest.raises(NotRecordedError, match="the model is in runs/done/model") as error:
        run(*BRIEF)
    assert error.value.lines[-1] == "model card: failed (OSError: [Errno 28] No space left on device)"
    assert json.loads(Path("runs/done/report.json").read_text())["training"]["batches"] == 2
    assert Path("runs/done/model/model.safetensors").exists()
