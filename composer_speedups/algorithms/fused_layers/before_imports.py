"""Compile the kernels of fused_layers in a separate process during the run's imports.

Imports hold Python's global interpreter lock for seconds, and so does much of Triton's work, so threads would wait for
each other. The run finds the compiled kernels in Triton's cache on disk. The process reads the shapes from the model's
config.json; if it cannot, the run compiles the kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_speedups.core.before_imports import PlannedRun
from composer_speedups.core.subprocesses import command_output, python_module_command
from composer_speedups.families.family import kernel_shape
from composer_speedups.kernels import Shape
from composer_speedups.tasks.model_names import SIZES, resolve_name


def before_torch(run: PlannedRun) -> subprocess.Popen[bytes] | None:
    """Start the process if the run trains on a GPU; only local rank 0 starts one."""
    gpu = run.device != "cpu" and Path("/dev/nvidiactl").exists()
    return _start(run) if gpu and os.environ.get("LOCAL_RANK", "0") == "0" else None


def shape_of(model: Mapping[str, Any]) -> Shape:
    """Return the kernels' shape for ``name``, ``size`` and ``dropout`` of the config's model.

    Raises:
        ConfigError, KeyError, OSError: An unknown family, or a model that is not on this machine yet.
    """
    if model["size"] is not None:
        _, hidden, heads = SIZES[model["size"]]
        found = {"model_type": "bert", "hidden_size": hidden, "num_attention_heads": heads}
        found |= {"intermediate_size": 4 * hidden, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    else:
        found = json.loads(_config_file(model["name"]).read_text())
    if model["dropout"] is not None:
        found |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model["dropout"])
    return kernel_shape(found)


def _config_file(name: str) -> Path:
    name = resolve_name(name)
    if Path(name).is_dir():
        return Path(name) / "config.json"
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        raise FileNotFoundError(name)
    return Path(found)


def _shared_gpus() -> bool:
    """Return whether several processes may use each GPU; in exclusive mode, only the run may."""
    modes = command_output("nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader") or ""
    return {mode.strip() for mode in modes.split("\n")} == {"Default"}


def _start(run: PlannedRun) -> subprocess.Popen[bytes]:
    mixed = (run.algorithms.get("mixed_precision") or {}).get("dtype", "bf16")
    float8 = (run.algorithms.get("fused_layers") or {}).get("precision") == "fp8"
    found = {"model": run.model, "fp16": "amp_fp16" in (f"amp_{mixed}", run.precision), "float8": float8}
    arguments = json.dumps(found)
    command, environment = python_module_command(__name__, arguments)
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=environment)


def _main(arguments: str) -> None:
    run = json.loads(arguments)
    shape = shape_of(run["model"])
    if not _shared_gpus():
        return
    import torch

    from composer_speedups.kernels.compile_ahead import compile_ahead

    dtype = torch.float16 if run["fp16"] else torch.bfloat16
    compile_ahead(shape, dtype, torch.device("cuda", 0), float8=run["float8"]).close()


if __name__ == "__main__":
    _main(sys.argv[1])
