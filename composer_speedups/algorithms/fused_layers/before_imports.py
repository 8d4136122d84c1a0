"""Compile the kernels of fused_layers in a separate process during the run's imports.

The run finds the compiled kernels in Triton's cache on disk. This process reads the shapes from the model's
config.json; if it cannot, the run compiles the kernels. See :func:`composer_speedups.train.startup.early_processes`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_speedups.core.subprocesses import command_output
from composer_speedups.families.family import kernel_shape
from composer_speedups.kernels import Shape
from composer_speedups.tasks.settings import SIZES, resolve_name


def shape_of(model: Mapping[str, Any]) -> Shape:
    """Return the kernels' shape for ``name``, ``size`` and ``dropout`` of the config's model.

    Raises:
        ConfigError, KeyError, OSError: An unknown family, or a model that is not on this machine yet.
    """
    if model["size"] is not None:
        _, hidden, heads = SIZES[model["size"]]
        config = {"model_type": "bert", "hidden_size": hidden, "num_attention_heads": heads}
        config |= {"intermediate_size": 4 * hidden, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    else:
        config = json.loads(_config_file(model["name"]).read_text())
    if model["dropout"] is not None:
        config |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model["dropout"])
    return kernel_shape(config)


def _config_file(name: str) -> Path:
    name = resolve_name(name)
    if Path(name).is_dir():
        return Path(name) / "config.json"
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    if not isinstance(cached, str):
        raise FileNotFoundError(name)
    return Path(cached)


def _shared_gpus() -> bool:
    """Return whether several processes may use each GPU; in exclusive mode, only the run may."""
    modes = command_output("nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader") or ""
    return {mode.strip() for mode in modes.split("\n")} == {"Default"}


def _main(run: Mapping[str, Any]) -> None:
    shape = shape_of(run["model"])
    if not _shared_gpus():
        return
    import torch

    from composer_speedups.kernels.compile_ahead import compile_ahead

    settings = {name: chosen or {} for name, chosen in run["algorithms"].items()}
    fp16 = settings.get("mixed_precision", {}).get("dtype") == "fp16" or run["precision"] == "amp_fp16"
    float8 = settings["fused_layers"].get("precision") == "fp8"
    dtype = torch.float16 if fp16 else torch.bfloat16
    ranks: tuple[int, ...] = ()
    if (lora := settings.get("lora")) is not None and not {"targets", "dropout"} & lora.keys():
        rank = lora.get("rank", 8)
        ranks = (3 * rank, rank, rank, rank)
    compile_ahead(shape, dtype, torch.device("cuda", 0), float8=float8, ranks=ranks).close()


if __name__ == "__main__":
    _main(json.load(sys.stdin))
