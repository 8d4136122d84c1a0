"""Print a table on the console and into files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["markdown_table"]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, with columns of equal width."""
    table = Table(*columns, box=box.MARKDOWN)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # brackets are not rich's markup
    console = Console(file=io.StringIO(), width=1000, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]
