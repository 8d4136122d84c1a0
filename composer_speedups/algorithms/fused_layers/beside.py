"""Compile the kernels of fused_layers in a process of their own, while the run's imports go on.

Imports keep Python's one lock for seconds, and so does much of Triton's work: threads would wait for each other. What
the other process compiles, the run finds in Triton's cache on disk. It knows the shapes from the model's config.json;
where it does not, the run compiles for itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_speedups.families.family import kernel_shape
from composer_speedups.kernels import Shape
from composer_speedups.tasks.model_names import SIZES, resolve_name
from composer_speedups.train.commands import output_of
from composer_speedups.train.config import Config

__all__ = ["compiling_beside", "shape_of", "wait_for"]

_AT_MOST = 60.0  # seconds that a run waits for it


@contextlib.contextmanager
def compiling_beside(config: Config) -> Iterator[subprocess.Popen[bytes] | None]:
    """Start it where the config will want it, on the first GPU of this host; at the end it is over.

    Yields:
        The process, for :func:`wait_for`; None where there is nothing to compile.
    """
    process = _start(config) if _wanted(config) else None
    try:
        yield process
    finally:
        if process is not None:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes] | None) -> None:
    """Until all is compiled; whatever came of it, the run goes on."""
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_AT_MOST)


def shape_of(model: Mapping[str, Any]) -> Shape:
    """The kernels' shape, from ``name``, ``size`` and ``dropout`` of the config's model.

    Raises:
        ConfigError, KeyError, OSError: It cannot be told: another family, or a model that is not on this machine yet.
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


def _wanted(config: Config) -> bool:
    gpu = config.trainer.device != "cpu" and Path("/dev/nvidiactl").exists()
    return gpu and "fused_layers" in config.algorithms and os.environ.get("LOCAL_RANK", "0") == "0"


def _shared_gpus() -> bool:
    """Whether several processes may use each of them; a GPU in exclusive mode is the run's alone."""
    modes = output_of("nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader") or ""
    return {mode.strip() for mode in modes.split("\n")} == {"Default"}


def _start(config: Config) -> subprocess.Popen[bytes]:
    mixed = (config.algorithms.get("mixed_precision") or {}).get("dtype", "bf16")
    model = {name: getattr(config.model, name) for name in ("name", "size", "dropout")}
    arguments = json.dumps({"model": model, "fp16": "amp_fp16" in (f"amp_{mixed}", config.trainer.precision)})
    # It imports what this process would. "-m" alone would add the working directory, and whatever modules lie there.
    path = os.pathsep.join(place for place in sys.path if place)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


def _main(arguments: str) -> None:
    given = json.loads(arguments)
    shape = shape_of(given["model"])
    if not _shared_gpus():
        return
    import torch

    from composer_speedups.kernels.compile_ahead import compile_ahead

    dtype = torch.float16 if given["fp16"] else torch.bfloat16
    compile_ahead(shape, dtype, torch.device("cuda", 0)).close()


if __name__ == "__main__":
    _main(sys.argv[1])
