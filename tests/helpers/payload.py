"""What an attacker would put into a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["MARKER", "Payload"]

MARKER = Path("ran")  # what each attack leaves behind


class Payload:
    """Unpickling it makes the marker."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(MARKER),)
