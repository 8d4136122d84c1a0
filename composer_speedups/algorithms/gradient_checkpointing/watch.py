"""Seeing recomputation in graphs that torch.compile captures, where nothing in Python runs twice."""

from __future__ import annotations

import logging

__all__ = ["GraphWatch"]

_LOGGER = logging.getLogger("torch.__trace")  # torch's own trace of compilation, in 2.7 to 2.11
_OPERATOR = "= torch.ops.higher_order.tag_activation_checkpoint("


class GraphWatch(logging.Handler):
    """Between start and stop, counts the graphs that dynamo captures and the regions in them marked for recomputation.

    Attributes:
        graphs: Graphs captured.
        regions: Calls of ``tag_activation_checkpoint`` in them; AOTAutograd recomputes what they hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graphs = self.regions = 0
        self._propagate: bool | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if "dynamo_output_graph" in getattr(record, "metadata", {}):
            self.graphs += 1
            self.regions += str(getattr(record, "payload", "")).count(_OPERATOR)

    def start(self) -> None:
        if self._propagate is None:
            self._propagate, _LOGGER.propagate = _LOGGER.propagate, False  # hundreds of lines of no one's concern
            _LOGGER.addHandler(self)

    def stop(self) -> None:
        if self._propagate is not None:
            _LOGGER.removeHandler(self)
            _LOGGER.propagate, self._propagate = self._propagate, None
