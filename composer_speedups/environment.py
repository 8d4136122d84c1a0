"""What a run ran on: hardware, versions, commit. Goes into every report and every benchmark row."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["environment"]

_PACKAGES = {
    "composer": "mosaicml",
    "transformers": "transformers",
    "datasets": "datasets",
    "triton": "triton",
}

_CODE = ("--", ":(top)", ":(top,exclude)benchmarks/results")  # new rows beside it change no code


def environment() -> dict[str, Any]:
    """GPU, driver, CPU, versions, and the commit of the code in use (None outside a git checkout)."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    named = os.environ.get("COMPOSER_SPEEDUPS_COMMIT")  # for a copy of the code without its git history
    commit = named or _git("rev-parse", "HEAD")
    return {
        "gpu": gpu,
        "gpu_count": torch.cuda.device_count(),
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "cuda": torch.version.cuda,
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(package) for name, package in _PACKAGES.items()},
        "composer_speedups": _version("composer_speedups"),
        "commit": commit,
        "uncommitted_changes": None if named or not commit else bool(_git("status", "--porcelain", "-uno", *_CODE)),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _git(*arguments: str) -> str | None:
    return _run("git", "-C", str(Path(__file__).parent), *arguments)


def _run(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip().split("\n")[0] or None if done.returncode == 0 else None
