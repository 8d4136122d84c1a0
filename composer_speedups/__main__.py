"""``python -m composer_speedups`` and ``composer-speedups``: print the version and the names of the other commands."""

from __future__ import annotations

import argparse

from composer_speedups import __version__

_COMMANDS = """\
commands, each with its own --help:
  composer-speedups-train       train as a YAML file says:    composer-speedups-train -f quickstart
  composer-speedups-tune        find the fastest techniques:  composer-speedups-tune -f quickstart
  composer-speedups-predict     predict with a finished run:  composer-speedups-predict runs/quickstart --input FILE
  composer-speedups-repeat      mean over several seeds:      composer-speedups-repeat -f quickstart seeds=1..3
  composer-speedups-dashboards  compare runs at Weights & Biases
"""


def command(arguments: list[str] | None = None) -> None:
    """Print the version or the list of commands."""
    parser = argparse.ArgumentParser(
        prog="composer-speedups",
        description="Techniques that make fine-tuning Hugging Face encoders with MosaicML Composer fast.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"composer-speedups {__version__}")
    _, unread = parser.parse_known_args(arguments)
    if unread:
        name = f"{parser.prog}-{unread[0]}"
        hint = f"; did you mean {name}?" if f" {name} " in _COMMANDS else "; see --help"
        parser.exit(2, f"{parser.prog}: cannot read {unread[0]!r}{hint}\n")
    parser.print_help()


if __name__ == "__main__":
    command()
