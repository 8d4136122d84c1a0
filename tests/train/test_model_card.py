"""The card of an exported model: metadata that the hub reads, data without paths, metrics, techniques, versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

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
    assert (data.base_model, data.datasets) == (None, None)
    words = " ".join(text.split())
    assert f"| accuracy | {report['metrics']['accuracy']:.6g} |" in words
    assert "train_accuracy" in report["metrics"]
    assert "train_" not in text, "of a last batch, which may have two samples"
    assert "trained from random weights" in text
    assert "Generated samples (builtin), at most 48 tokens per text." in text
    assert "\n2 batches of 8 samples (`2ba`), learning rate 0.001, seed 17.\n" in text
    for name, entry in report["algorithms"].items():
        assert f"| `{name}` | {next(iter(entry['evidence']))} " in words
    for name in ("torch", "composer", "transformers", "python"):
        assert f"| {name} | {report['environment'][name]} |" in words

    hub = {"source": "hub", "hub_name": "nyu-mll/glue", "hub_config": "mrpc", "eval_split": "validation"}
    pretrained = {"init": "pretrained", "name": "google-bert/bert-base-uncased"}
    text = str(model_card(changed(report, data=hub, model=pretrained)))
    assert "dataset `nyu-mll/glue mrpc`, trained on `train`, validated on `validation`, at most" in text
    data = read(text)
    assert (data.base_model, data.datasets) == ("google-bert/bert-base-uncased", ["nyu-mll/glue"])

    files = {"source": "files", "train_file": "/secret/of/mine/part-*.csv"}
    text = str(model_card(changed(report, data=files, model={"init": "pretrained", "name": "/secret/bert|x"})))
    assert "secret" not in text
    assert "Files: part-*.csv, at most 48" in text
    assert "trained from `bert|x`" in text
