"""README.md of an exported model: data, metrics, techniques and versions, in the format of the Hugging Face hub."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from tabulate import tabulate

from composer_speedups.callbacks.run_report import describe_evidence

_PIPELINES = {  # the hub's names of tasks
    "token_classification": "token-classification",
    "reranking": "text-ranking",
    "embedding": "sentence-similarity",
    "mlm": "fill-mask",
}
_VERSIONS = ("composer_speedups", "commit", "torch", "composer", "transformers", "datasets", "triton", "python", "gpu")
_BODY = """
# {run_name}

Task `{task}`, trained from {start} with composer_speedups.

## Data

{data}, at most {max_length} tokens per text.

## Metrics

{metrics}

## Training

{batches:,} batches of {batch} (`{duration}`), learning rate {lr:g}, seed {seed}.{best}

## Techniques

{techniques}

## Versions

{versions}
"""


def model_card(report: dict[str, Any]) -> ModelCard:
    """The card of a run's model, from its report.json; it names local folders and files without their paths."""
    config, best = report["config"], report["best"]
    model, data, name = config["model"], config["data"], config["model"]["name"]
    # without those of the training, which are of its last batch alone
    metrics = {k: v for k, v in report["metrics"].items() if v is not None and not k.startswith("train_")}
    pretrained, local = model["init"] == "pretrained", name.startswith(("/", ".", "~")) or os.path.isdir(name)
    metadata = ModelCardData(
        base_model=name if pretrained and not local and "/" in name else None,
        datasets=[data["hub_name"]] if data["source"] == "hub" else None,
        library_name="sentence-transformers" if model["task"] == "embedding" else "transformers",
        pipeline_tag=_PIPELINES.get(model["task"], "text-classification"),
        tags=["composer_speedups"],
        model_name=report["run_name"],
    )
    evidence = {f"`{name}`": describe_evidence(entry["evidence"]) for name, entry in report["algorithms"].items()}
    body = _BODY.format(
        run_name=report["run_name"],
        task=model["task"],
        start=f"`{os.path.basename(name.rstrip('/')) if local else name}`" if pretrained else "random weights",
        data=_data(data),
        max_length=data["max_length"],
        metrics=_table({k: f"{v:.6g}" for k, v in metrics.items()}, "metric", "value"),
        batches=report["training"]["batches"],
        batch=f"{data['batch_tokens']:,} tokens" if data["batch_size"] is None else f"{data['batch_size']:,} samples",
        duration=config["trainer"]["max_duration"],
        lr=config["optimizer"]["lr"],
        seed=config["seed"],
        best=f" The weights are those after batch {best['batch']}, where {best['metric']} was best." if best else "",
        techniques=_table(evidence, "technique", "evidence"),
        versions=_table({k: v for k in _VERSIONS if (v := report["environment"].get(k))}, "what", "version"),
    )
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n{body}")


def _data(data: dict[str, Any]) -> str:
    held_out = None
    if data["source"] == "hub":
        names = [data["hub_name"], data["hub_config"], data["hub_revision"]]
        origin = f"The hub's dataset `{' '.join(filter(None, names))}`, trained on `{data['train_split']}`"
        held_out = data["eval_split"] and f"validated on `{data['eval_split']}`"
    else:
        files = [os.path.basename(path.rstrip("/")) for path in (data["train_file"], data["eval_file"]) if path]
        origin = f"Files: {', '.join(files)}" if files else f"Generated samples ({data['source']})"
    if data["eval_fraction"] is not None:
        held_out = f"validated on {data['eval_fraction']:g} of these samples"
    return ", ".join(filter(None, [origin, held_out]))


def _table(rows: dict[str, Any], *head: str) -> str:
    cells = [[str(cell).replace("|", r"\|") for cell in row] for row in rows.items()]
    return tabulate(cells, head, tablefmt="github", disable_numparse=True)
