"""README.md of an exported model: data, metrics, techniques and versions, in the format of the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from composer_speedups.callbacks.run_report import describe_evidence
from composer_speedups.core.files import write_atomically
from composer_speedups.tasks.task import task_class

# Task → its name on the hub; that of classification for other heads of the same class.
_PIPELINES = {
    "token_classification": "token-classification",
    "reranking": "text-ranking",
    "embedding": "sentence-similarity",
    "mlm": "fill-mask",
}
_OTHER_PIPELINE = "text-classification"
_MOST_CLASSES = 100
_VERSIONS = ("composer_speedups", "commit", "torch", "composer", "transformers", "datasets", "triton", "python", "gpu")


def write_model_card(report: dict[str, Any], folder: Path) -> None:
    """Write the card of a run's report to the folder of the exported model."""
    write_atomically(folder / "README.md", str(model_card(report)))


def model_card(report: dict[str, Any]) -> ModelCard:
    """The card of a run's model, from its report.json.

    Of local folders and files it has the names without their paths. Metrics are also in its metadata if the data are a
    dataset of the hub.
    """
    config = report["config"]
    model, data = config["model"], config["data"]
    task = model["task"]
    # without those of the training, which are of its last batch alone
    metrics = {k: v for k, v in report["metrics"].items() if v is not None and not k.startswith("train_")}
    hub = data["hub_name"] if data["source"] == "hub" else None
    pipeline = _PIPELINES.get(task, _OTHER_PIPELINE)
    is_base = model["init"] == "pretrained" and "/" in model["name"] and not _is_local(model["name"])
    results = [
        EvalResult(
            task_type=pipeline,
            dataset_type=hub,
            dataset_name=hub,
            dataset_config=data["hub_config"],
            dataset_split=data["eval_split"],
            dataset_revision=data["hub_revision"],
            metric_type=name,
            metric_value=value,
        )
        for name, value in metrics.items()
        if hub and data["eval_split"] and data["eval_fraction"] is None
    ]
    metadata = ModelCardData(
        base_model=model["name"] if is_base else None,
        datasets=[hub] if hub else None,
        library_name="sentence-transformers" if task == "embedding" else "transformers",
        pipeline_tag=pipeline,
        tags=["composer_speedups"],
        model_name=report["run_name"],
        eval_results=results or None,
    )
    sections = {
        "Use": _usage(task),
        "Data": _data(data),
        "Metrics": _table(("metric", "value"), [(name, f"{value:.6g}") for name, value in metrics.items()]),
        "Classes": _classes(report["classes"].get("classes", {})),
        "Training": _training(report),
        "Techniques": _techniques(report["algorithms"]),
        "Versions": _table(
            ("what", "version"),
            [(name, report["environment"][name]) for name in _VERSIONS if report["environment"].get(name)],
        ),
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items() if text)
    start = "random weights"
    if model["init"] == "pretrained":
        start = f"`{_last_part(model['name']) if _is_local(model['name']) else model['name']}`"
    title = f"# {report['run_name']}\n\nTask `{task}`, trained from {start} with composer_speedups."
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{title}\n\n{body}\n")


def _usage(task: str) -> str:
    if task == "embedding":
        package, name = "sentence_transformers", "SentenceTransformer"
        lines = [f'model = {name}("FOLDER")', 'vectors = model.encode(["a text"])']
    else:
        package, name = "transformers", task_class(task).auto_class
        lines = [f'model = {name}.from_pretrained("FOLDER")', 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")']
        name = f"{name}, AutoTokenizer"
    return "\n".join(["```python", f"from {package} import {name}", "", *lines, "```"])


def _data(data: dict[str, Any]) -> str:
    kinds = {"builtin": "built-in samples", "random": "random tokens"}
    if data["source"] == "hub":
        config = f", configuration `{data['hub_config']}`" if data["hub_config"] else ""
        revision = f", revision `{data['hub_revision']}`" if data["hub_revision"] else ""
        origin = f"the hub's dataset `{data['hub_name']}`{config}{revision}"
        trained = f"trained on `{data['train_split']}`"
        held_out = data["eval_split"] and f"validated on `{data['eval_split']}`"
    else:
        origin = kinds.get(data["source"], "files")
        trained = f"trained on `{_last_part(data['train_file'])}`" if data["train_file"] else ""
        held_out = data["eval_file"] and f"validated on `{_last_part(data['eval_file'])}`"
    if data["eval_fraction"] is not None:
        held_out = f"validated on {data['eval_fraction']:g} of these samples"
    return ", ".join(filter(None, [origin, trained, held_out, f"at most {data['max_length']} tokens per text"])) + "."


def _classes(classes: dict[str, dict[str, Any]]) -> str:
    shown = ("precision", "recall", "f1", "samples")
    rows = [(name, *("–" if v[key] is None else f"{v[key]:.4g}" for key in shown)) for name, v in classes.items()]
    return _table(("class", *shown), rows) if 0 < len(rows) <= _MOST_CLASSES else ""


def _training(report: dict[str, Any]) -> str:
    config, training = report["config"], report["training"]
    optimizer, best = config["optimizer"], report["best"]
    kept = f" The weights are those after batch {best['batch']}, where {best['metric']} was best." if best else ""
    return (
        f"{training['batches']:,} batches of {config['data']['batch_size']:,} samples "
        f"(`{config['trainer']['max_duration']}`), learning rate {optimizer['lr']:g}, seed {config['seed']}.{kept}"
    )


def _techniques(algorithms: dict[str, Any]) -> str:
    rows = []
    for name, entry in algorithms.items():
        rows.append((f"`{name}`", "yes" if entry["engaged"] else "no", describe_evidence(entry["evidence"])))
    return _table(("technique", "engaged", "evidence"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    if not rows:
        return ""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _is_local(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or os.path.isdir(name)


def _last_part(path: str) -> str:
    return os.path.basename(path.rstrip("/"))
