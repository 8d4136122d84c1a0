"""The stub ``composer_speedups/__init__.pyi``, which lists the package's lazy names for type checkers and editors."""

from __future__ import annotations

import composer_speedups

__all__ = ["package_stub"]

_HEAD = """\
# Written by python -m benchmarks.render: what __init__.py imports when it is first asked for.

__version__: str
__all__: list[str]

"""


def package_stub() -> str:
    """The text of the stub, with one import per public name."""
    modules = composer_speedups._public()  # type: ignore[attr-defined]
    by_module = sorted(modules.items(), key=lambda item: (item[1], item[0]))
    imports = (f"from {module} import {name} as {name}\n" for name, module in by_module)
    return _HEAD + "".join(imports)
