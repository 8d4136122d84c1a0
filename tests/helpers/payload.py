"""A pickle payload that executes code when it is loaded, for tests of attacks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

MARKER = Path("ran")  # the folder that an attack creates


class Payload:
    """Unpickling an instance creates the marker."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(MARKER),)
