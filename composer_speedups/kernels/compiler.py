"""Find the C compiler with which Triton builds the code that launches its kernels. It does not import Triton."""

from __future__ import annotations

import os
import shutil

__all__ = ["missing_c_compiler"]


def missing_c_compiler() -> str | None:
    """Return which C compiler Triton does not find, as the end of "needs a C compiler: …"; None if it finds one.

    Triton runs ``$CC`` if it is set, and otherwise gcc or clang. Source: triton/runtime/build.py.
    """
    named = os.environ.get("CC")
    candidates = ["gcc", "clang"] if named is None else [named]
    if any(map(shutil.which, candidates)):
        return None
    return "neither gcc nor clang is installed" if named is None else f"CC is {named!r}, which is not a program"
