"""A report or plot that fails after training is reported at the end, and does not cost the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from composer.utils import dist

from composer_speedups.core.errors import RunFailedError, first_line


class Recording:
    """Collects what could not be recorded: the report, the model card, the plot."""

    def __init__(self) -> None:
        self._failures: list[str] = []

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Keep an error of the block for :meth:`check`."""
        try:
            yield
        except Exception as error:
            self._failures.append(f"{what}: failed ({type(error).__name__}: {first_line(error)})")

    def check(self, model: Path | None) -> None:
        """Raise an error on rank 0 if anything failed on any rank. Collective: every rank must call it.

        Args:
            model: Folder of the exported model; None if it was not exported.

        Raises:
            RunFailedError: Names everything that failed.
        """
        failures = [line for lines in dist.all_gather_object(self._failures) for line in lines]
        if failures and dist.get_global_rank() == 0:
            exported = "" if model is None else f"; the model is in {model}"
            raise RunFailedError.of([f"the run was trained to its end{exported}. What failed:", *failures])
