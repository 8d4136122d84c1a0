"""The files that a run reads, by content, so that no run continues or is reused with others; does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from composer_speedups.core.files import TEXTS, WEIGHTS, check_folder, hashes_of, model_files
from composer_speedups.data.paths import find_files, is_address
from composer_speedups.tasks.settings import resolve_name
from composer_speedups.train.config.schema import Config

Inputs = dict[str, dict[str, str]]
"""Config key → name of each file that it makes the run read → hash of the content."""

INITIAL = "checkpoint.load"
"""The key of weights that a resumed run does not read again."""
_FOLDERS = ("model.name", "data.tokenizer")  # in which names say what a file is; others may be renamed


def inputs_of(config: Config) -> Inputs:
    """The hashes of the local data files, weights, configuration and tokenizer that a run of this config reads."""
    data, model, load = config.data, config.model, config.checkpoint.load
    hub = data.hub_name if data.source == "hub" else None
    found = {
        "data.hub_name": _data_files(hub, "data.hub_name") if hub and os.path.isdir(hub) else [],
        "data.train_file": _data_files(data.train_file, "data.train_file"),
        "data.eval_file": _data_files(data.eval_file, "data.eval_file"),
    }
    if model.size is None or data.tokenizer is None:
        kinds = TEXTS if model.init == "random" else (*TEXTS, *WEIGHTS)
        found["model.name"] = model_files(resolve_name(model.name), kinds)
    if data.tokenizer not in (None, "wordpiece"):
        found["data.tokenizer"] = model_files(check_folder(str(data.tokenizer), "data.tokenizer"), TEXTS)
    if load is not None and config.checkpoint.weights_only and os.path.isfile(load):
        found[INITIAL] = [(load, Path(load))]
    return {key: hashes_of(paths, key) for key, paths in found.items() if paths}


def changed_input(before: Inputs, now: Inputs) -> str | None:
    """The key and the first file whose content differs, as in ``data.train_file: train.csv``; None if none does."""
    for key in {**now, **before}:
        old, new = before.get(key, {}), now.get(key, {})
        if old == new or (key not in _FOLDERS and [*old.values()] == [*new.values()]):
            continue
        return f"{key}: {next(name for name in {**old, **new} if old.get(name) != new.get(name))}"
    return None


def _data_files(name: str | None, key: str) -> list[tuple[str, Path]]:
    if name is None or is_address(name):
        return []
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):  # of save_to_disk, or of MDS shards
        return [(str(path), path) for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return [(path, Path(path)) for path in find_files(name, key)]
