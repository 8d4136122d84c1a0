"""MkDocs hooks: the cards and the reference of techniques become pages, without a copy of them in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
CARDS = sorted((ROOT / "composer_speedups" / "algorithms").glob("*/README.md"))
STUB = ROOT / "composer_speedups" / "__init__.pyi"
_ROLE = re.compile(r":(?:py:)?(?:attr|class|func|meth|mod):<code>[.~]?(.*?)</code>")


def on_config(config: Any) -> Any:
    """Add the cards to the navigation, below "Techniques"."""
    techniques = next(section["Techniques"] for section in config.nav if "Techniques" in section)
    techniques += [{card.parent.name: f"techniques/{card.parent.name}.md"} for card in CARDS]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each card, and the reference of all classes and functions of techniques."""
    for card in CARDS:
        files.append(File.generated(config, f"techniques/{card.parent.name}.md", content=_card(card.read_text())))
    files.append(File.generated(config, "api/algorithms.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to cards, which lead to the repository's files on GitHub, lead to the cards' pages."""
    return re.sub(r"\]\(\.\./composer_speedups/algorithms/(\w+)/README\.md", r"](techniques/\1.md", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things by Sphinx's roles; show the name alone."""
    return _ROLE.sub(r"<code>\1</code>", html)


def _card(text: str) -> str:
    text = re.sub(r"\]\(\.\./\.\./\.\./docs/", "](../", text)
    return re.sub(r"\]\(\.\./(\w+)/README\.md", r"](\1.md", text)


def _reference() -> str:
    names = re.findall(r"^from (composer_speedups\.algorithms\.\S+) import (\w+) as", STUB.read_text(), re.MULTILINE)
    lines = ["# Algorithms", "", "Classes for Composer's Trainer, and functions for any loop."]
    technique = ""
    for module, name in names:
        if module.split(".")[2] != technique:
            technique = module.split(".")[2]
            lines += ["", f"## {technique}", "", f"[The card of {technique}](../techniques/{technique}.md)", ""]
        lines += [f"::: {module}.{name}", "    options: {heading_level: 3}", ""]
    return "\n".join(lines)
