"""Writing files so that a killed run leaves none half-written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as partial:
        partial.write(data)
    os.chmod(partial.name, 0o644)
    os.replace(partial.name, path)
