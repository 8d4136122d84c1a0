"""Generated files of the package: the stub of its lazy names, and the catalogue of techniques and tasks."""

from __future__ import annotations

import json

import composer_speedups

__all__ = ["package_catalogue", "package_stub"]

_HEAD = """\
# Written by python -m benchmarks.render: what __init__.py imports when it is first asked for.

__version__: str
__all__: list[str]

"""


def package_stub() -> str:
    """The text of ``__init__.pyi``, which lists the lazy names for type checkers, with one import per public name."""
    modules = composer_speedups._public()  # type: ignore[attr-defined]
    by_module = sorted(modules.items(), key=lambda item: (item[1], item[0]))
    imports = (f"from {module} import {name} as {name}\n" for name, module in by_module)
    return _HEAD + "".join(imports)


def package_catalogue() -> str:
    """The text of ``_catalogue.json``, from the classes of the techniques and tasks; see ``core/catalogue.py``."""
    from composer_speedups.core.catalogue import description_of, technique_names
    from composer_speedups.tasks.task import specific_keys

    techniques = {name: description_of(name)._asdict() for name in technique_names()}
    for entry in techniques.values():
        del entry["name"]
    return json.dumps({"techniques": techniques, "tasks": specific_keys()}, indent=1, ensure_ascii=False) + "\n"
