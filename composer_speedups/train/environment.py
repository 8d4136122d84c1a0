"""The environment of a run: hardware, versions, commit. Part of every report and benchmark row."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from composer_speedups.core.processes import command_output

_PACKAGES = ("transformers", "datasets", "triton", "apex", "composer_speedups")

_GPU_STATE = {  # name in a report → name in nvidia-smi's query
    "driver": "driver_version",
    "gpu_power_limit_watts": "power.limit",
    "gpu_sm_clock_mhz": "clocks.sm",
    "gpu_max_sm_clock_mhz": "clocks.max.sm",
}

_CODE_PATHS = ("--", ":(top)", ":(top,exclude)benchmarks/results")  # results do not affect the code


def environment() -> dict[str, Any]:
    """GPU, driver, CPU, versions, and the commit of the code (None outside a git checkout)."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", None) if gpu else None
    named = os.environ.get("COMPOSER_SPEEDUPS_COMMIT")  # for copies of the code without its git history
    git = ("git", "-C", str(Path(__file__).parent))
    commit = named or _run(*git, "rev-parse", "HEAD")
    changed = None if named or not commit else bool(_run(*git, "status", "--porcelain", "-uno", *_CODE_PATHS))
    return {
        "gpu": gpu,
        "gpu_count": torch.cuda.device_count(),
        **(gpu_state(None if uuid is None else f"GPU-{uuid}") if gpu else dict.fromkeys(_GPU_STATE)),
        "cuda": torch.version.cuda,
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "composer": _version("mosaicml"),
        **{name: _version(name) for name in _PACKAGES},
        "commit": commit,
        "uncommitted_changes": changed,
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, such as ``NVIDIA H200``, or the processor's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(_cpu())


def gpu_state(identity: str | None = None) -> dict[str, Any]:
    """Driver version, power limit and SM clocks of a GPU, by UUID or index, from nvidia-smi; None for others."""
    command = ("nvidia-smi", f"--query-gpu={','.join(_GPU_STATE.values())}", "--format=csv,noheader,nounits")
    output = _run(*command, f"--id={identity}") if identity is not None else None
    output = output or _run(*command)  # nvidia-smi does not accept the identity of a MIG instance
    fields = [field.strip() for field in (output or "").split(",")]
    if len(fields) != len(_GPU_STATE):
        return dict.fromkeys(_GPU_STATE)
    driver, *numbers = fields
    values = [float(text) if re.fullmatch(r"[\d.]+", text) else None for text in numbers]  # or [N/A]
    return dict(zip(_GPU_STATE, [driver, *values], strict=True))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def _run(*command: str) -> str | None:
    """The first line of a command's output; None if it fails or prints nothing."""
    return (command_output(*command) or "").split("\n")[0] or None
