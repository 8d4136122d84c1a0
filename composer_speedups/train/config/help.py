"""The text of ``composer train.py --help``, made from the schema and the techniques' sources."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from composer_speedups.core.catalogue import describe
from composer_speedups.core.settings import field_docs
from composer_speedups.train.config.load import schema_keys, section_of
from composer_speedups.train.config.schema import Config

__all__ = ["help_text"]

_USAGE = """\
usage: composer train.py -f FILE [key=value ...]

Fine-tune a Hugging Face BERT with Composer and the techniques that FILE names.
Later key=value pairs override FILE; values are YAML: data.batch_size=64, algorithms.torch_compile={},
algorithms.torch_compile.scope=blocks, algorithms.tf32_matmul=null (takes it out).

exit status: 0 done; 1 the run failed; 2 a bad config, dataset or technique, said on one line;
143 and 130 stopped by SIGTERM or Ctrl-C, with a checkpoint where checkpoint.interval is set.
"""
_TECHNIQUES = "techniques (keys of algorithms; each takes an on_unavailable of its own too):"


def help_text() -> str:
    """Usage, every key with its type, default and doc line, and every technique with its settings."""
    return "\n".join([_USAGE, "keys:", *_keys(), "", _TECHNIQUES, *_techniques(), ""])


def _keys() -> Iterator[str]:
    docs: dict[str, dict[str, str]] = {"": field_docs(Config)}
    for dotted, field, hint in schema_keys():
        prefix, _, name = dotted.rpartition(".")
        doc = docs[prefix][name]
        section = section_of(hint)
        if section is not None:
            docs[dotted] = field_docs(section)
            yield f"\n  {dotted}  ({doc})"
            if type(None) in typing.get_args(hint):
                default = "on" if field.default is dataclasses.MISSING else "null"
                yield f"  {dotted}: section or null = {default}"
        else:
            yield f"  {dotted}: {_type(hint)} = {_default(field)}{_bounds(field.metadata)}"
            yield f"      {doc}"


def _techniques() -> Iterator[str]:
    for technique in describe():
        yield f"  {technique.name}: {technique.summary}"
        for setting in technique.settings:
            yield f"    {setting.name}: {setting.hint} = {_yaml(setting.default)}{_bounds(setting.bounds)}"
            yield f"        {setting.doc}"
        if not technique.settings:
            yield "    no settings"


def _type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return "|".join(map(_type, typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if hint is type(None):
        return "null"
    return hint.__name__ if typing.get_origin(hint) is None else str(hint).replace("typing.", "")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    return _yaml(field.default)


def _yaml(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _bounds(rules: Mapping[str, Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{signs[k]} {v}" for k, v in rules.items() if k in signs]
    if rules.get("units"):
        bounds.append("units " + ", ".join(rules["units"]))
    return f"  [{'; '.join(bounds)}]" if bounds else ""
