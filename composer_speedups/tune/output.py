"""Where the tuned YAML goes, checked before anything is measured or torch is imported."""

from __future__ import annotations

from pathlib import Path

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import with_working_directory

__all__ = ["MARK", "check_output", "default_output"]

MARK = "# Written by composer_speedups.tune"
"""How every tuned YAML begins."""


def default_output(file: str) -> Path:
    """``x.tuned.yaml`` in the working directory for ``yamls/x.yaml``."""
    return Path(f"{Path(file).stem}.tuned.yaml")


def check_output(path: Path, file: str) -> None:
    """Refuse, before anything is measured, an output that could not be written or would replace somebody's file.

    Raises:
        ConfigError: Names ``tune.output``.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"tune.output: {path} does not end in .yaml; give it that ending")
    if not path.parent.is_dir():
        shown = with_working_directory(path.parent)
        raise ConfigError(f"tune.output: there is no folder {shown}; make it, or choose another")
    if path.is_dir() or (path.exists() and path.samefile(file)):
        raise ConfigError(f"tune.output: {path} is {'a folder' if path.is_dir() else 'the given YAML'}; choose another")
    if path.exists() and not path.read_text(errors="replace").startswith(MARK):
        raise ConfigError(f"tune.output: {path} exists and was not written by this command; choose another name")
