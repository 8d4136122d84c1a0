"""MkDocs hooks: the cards and the references of techniques and of config keys become pages, without a copy of them in
the repository.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from composer_speedups.core.registry import folder_of, technique_class, technique_names
from composer_speedups.core.settings import Settings, doc_of, key_line, keys_of, sections_of
from composer_speedups.sweep.tune import PREFIX, TuneConfig
from composer_speedups.train.config.schema import Config

ROOT = Path(__file__).parent.parent
CARDS = sorted((ROOT / "composer_speedups" / "algorithms").glob("*/README.md"))
_ROLE = re.compile(r":(?:py:)?(?:attr|class|func|meth|mod):<code>[.~]?(.*?)</code>")


def on_config(config: Any) -> Any:
    """Add the cards to the navigation, below "Techniques", and a link to the repository, if pyproject.toml names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"].get("Repository")
    techniques = next(section["Techniques"] for section in config.nav if "Techniques" in section)
    techniques += [{card.parent.name: f"techniques/{card.parent.name}.md"} for card in CARDS]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each card, and the references of the techniques' classes and functions and of all config keys."""
    for card in CARDS:
        files.append(File.generated(config, f"techniques/{card.parent.name}.md", content=_card(card.read_text())))
    files.append(File.generated(config, "api/algorithms.md", content=_reference()))
    files.append(File.generated(config, "api/config.md", content=_config_keys()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to cards, which lead to the repository's files on GitHub, lead to the cards' pages."""
    up = "../" * page.file.src_uri.count("/")
    link = r"\]\((?:\.\./)+composer_speedups/algorithms/(\w+)/README\.md"
    return re.sub(link, rf"]({up}techniques/\1.md", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things by Sphinx's roles; show the name alone."""
    return _ROLE.sub(r"<code>\1</code>", html)


def _card(text: str) -> str:
    text = re.sub(r"\]\(\.\./\.\./\.\./docs/", "](../", text)
    return re.sub(r"\]\(\.\./(\w+)/README\.md", r"](\1.md", text)


def _reference() -> str:
    lines = ["# Algorithms", "", "For Composer's Trainer, and with `apply` for any other loop."]
    for name in technique_names():
        technique, card = technique_class(name), folder_of(name).name
        lines += ["", f"## {name}", "", f"[The card](../techniques/{card}.md)", ""]
        lines += [f"::: {technique.__module__}.{technique.__name__}", "    options: {heading_level: 3}", ""]
    return "\n".join(lines)


def _config_keys() -> str:
    """Every key with its type, default, bounds and description, as ``--help`` prints them."""
    lines = ["# Config keys", ""]
    lines += ["The keys of a YAML and of `key=value`, as `--help` prints them: key, type, default, bounds and"]
    lines += ["what it does. The settings of the techniques are under [Algorithms](algorithms.md)."]
    lines += ["", "## The run", "", *_keys(Config)]
    return "\n".join([*lines, "", "## tune", "", "How `tune` searches.", "", *_keys(TuneConfig, PREFIX)])


def _keys(settings: type[Settings], prefix: str = "") -> list[str]:
    lines, task = [], ""
    for key, field, owner in keys_of(settings, prefix):
        if owner.option != task and owner.option:
            lines += ["", f"### With {owner.option}", ""]
        task, doc = owner.option, doc_of(field).replace("<", "&lt;")
        if not sections_of(field):
            lines.append(f"- `{key_line(key, field)}`<br>{doc}")
        elif key:
            lines += ["", f"{'#' * (2 + key.count('.'))} {key}", "", doc, ""]
    return lines
