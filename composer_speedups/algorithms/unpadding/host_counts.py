"""Token counts of a batch, taken on the host just before Composer moves it to the device.

Reading counts from the device would make the host wait for it. Composer moves each micro-batch, after splitting the
batch, with ``state.device.batch_to_device``, which this module replaces by a function that counts first. An algorithm
or a transform may change the batch afterwards, on the device. The counts are therefore kept by the moved tensor and its
version: they are not used for another tensor, nor for one that was changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from composer_speedups.packing.tokens import row_counts, token_masks

if TYPE_CHECKING:
    from composer.devices import Device

__all__ = ["HostCounts", "MaskFacts"]


class MaskFacts(NamedTuple):
    """What the host knows of a mask (B, S) or (B, texts, S).

    Attributes:
        tokens: Its real tokens.
        counts: See :meth:`.Packing.count`; for each row, B or B·texts of them.
    """

    tokens: int
    counts: Sequence[int]


class HostCounts:
    """Facts about the tensors of the batch that was moved to the device last.

    Args:
        device: The Trainer's device, whose ``batch_to_device`` this object replaces until :meth:`close`.
        count: A mask (rows, S), its labels, if there are any, and its real tokens per row → see :meth:`.Packing.count`.
    """

    def __init__(self, device: Device, count: Callable[[Tensor, Tensor | None, Sequence[int]], list[int]]) -> None:
        self._device, self._count = device, count
        self._move = device.batch_to_device
        self._patch = vars(device).get("batch_to_device")  # other code's, which replaced the class's method
        self._known: dict[int, tuple[Tensor, int, Any]] = {}  # by id: the tensor, its version, and its facts
        device.batch_to_device = self._count_and_move  # type: ignore[method-assign]

    def close(self) -> None:
        """Give the device the method back that it had."""
        if vars(self._device).get("batch_to_device") == self._count_and_move:
            if self._patch is None:
                del self._device.batch_to_device
            else:
                self._device.batch_to_device = self._patch  # type: ignore[method-assign]
        self._known.clear()

    def _count_and_move(self, batch: Any) -> Any:
        masks = {name: mask for name, mask in token_masks(batch).items() if mask.device.type == "cpu"}
        facts: dict[str, Any] = {
            name: self.facts(mask, self.labels_of(name, mask, batch)) for name, mask in masks.items()
        }
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if isinstance(labels, Tensor) and labels.device.type == "cpu":
            facts["labels"] = labels
        moved = self._move(batch)
        self._known.clear()
        for name, fact in facts.items():
            tensor = moved[name]
            if not tensor.is_inference():  # such a tensor has no version
                self._known[id(tensor)] = (tensor, tensor._version, fact)
        return moved

    def of(self, tensor: Tensor) -> Any:
        """What is known of a tensor: :class:`MaskFacts` of a mask, or the labels on the host. None if it was changed
        after it was moved, or never was on the host."""
        held, version, fact = self._known.get(id(tensor), (None, 0, None))
        return fact if held is tensor and version == tensor._version else None

    def facts(self, mask: Tensor, labels: Tensor | None) -> MaskFacts:
        """Count a mask. Synchronizes if it is on a GPU."""
        rows = mask.flatten(0, -2).cpu()
        tokens = row_counts(rows)
        return MaskFacts(sum(tokens), self._count(rows, labels, tokens))

    @staticmethod
    def labels_of(name: str, mask: Tensor, batch: Mapping[str, Any]) -> Tensor | None:
        """The labels that are checked together with a mask of a batch."""
        labels = batch.get("labels") if name == "attention_mask" and mask.ndim == 2 else None
        return labels if isinstance(labels, Tensor) else None
