"""The unpadding technique: the encoder runs on real tokens only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from composer.core import State
from pydantic import Field

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, swap_encoders
from composer_speedups.algorithms.unpadding.evidence import FirstForward
from composer_speedups.algorithms.unpadding.functional import LARGEST_MULTIPLE
from composer_speedups.algorithms.unpadding.host_counts import HostCounts, MaskFacts
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.parity_checked_technique import ParityCheckedTechnique
from composer_speedups.core.technique import Conflict, Stage
from composer_speedups.packing.encoder import UnpaddedEncoder, unpadded_encoders
from composer_speedups.packing.labelled_head import (
    LabelledHead,
    MLMHead,
    count_labels,
    labelled_heads,
)
from composer_speedups.packing.planning import Packing, PlannedBatch
from composer_speedups.packing.tokens import MULTIPLE, token_masks


class Unpadding(ParityCheckedTechnique):
    """Runs the encoder on real tokens only, with variable-length attention.

    Raises:
        TechniqueError: At INIT, for an unsupported model or head; in the first batch, for a custom model that reads
            hidden states of padding.
    """

    name = "unpadding"
    stage = Stage.SURGERY
    exactness = "rounding"
    conflicts = (
        Conflict("sdpa_attention", "both replace the model's attention; unpadding brings its own"),
        Conflict(
            "torch_compile",
            "torch_compile with dynamic: false, or a mode that captures CUDA graphs, would recompile for each number "
            "of tokens",
            when=lambda self, other: other.makes_graphs or other.dynamic is False,
        ),
    )
    gain = 1.1

    pad_to_multiple_of: int = Field(MULTIPLE, ge=1, le=LARGEST_MULTIPLE)
    """Round the number of packed tokens up to a multiple of this."""

    mlm_head: MLMHead = Field("all")
    """Tokens for which a masked-LM head computes logits in training: all, or those with a label."""

    def reset(self) -> None:
        super().reset()
        self._encoders: list[UnpaddedEncoder] = []
        self._heads: list[LabelledHead] = []
        self._host: HostCounts | None = None
        self._guard = False
        self._counted_on_device = 0  # masks of micro-batches whose tokens were counted on the device
        self._first = FirstForward()
        # totals of the training batches: real tokens and slots of the masks, labelled tokens and slots of the labels
        self._tokens = self._slots = self._labelled = self._label_slots = 0
        self._kept_padded = 0  # training micro-batches that an encoder could not pack

    def engage(self, state: State) -> dict[str, Any]:
        self._guard = self._because is not None  # the first batch is compared; later ones may read padding
        with self.refusals():
            self.reapply(state)
        if self._heads and getattr(state.model, "get_metrics", lambda **_: {})(is_train=True):
            self.withdraw(state)
            raise TechniqueError(
                self.name,
                "with mlm_head: labelled, training computes no logits of other tokens, and training metrics read them",
                "set model.train_metrics: false (in a HuggingFaceModel, use eval_metrics only), or mlm_head: all",
            )
        self._host = HostCounts(state.device, self._count)
        return {"encoders": len(self._encoders)}

    def reapply(self, state: State) -> None:
        swap_encoders(state.model, self.pad_to_multiple_of, self.mlm_head, self.owner, guard=self._guard)
        self._encoders, self._heads = unpadded_encoders(state.model), labelled_heads(state.model)

    def withdraw(self, state: State) -> None:
        restore_encoders(state.model, self.owner)

    def before_forward(self, state: State) -> None:
        facts = self._plan(state)
        self._tokens += sum(fact.tokens for fact in facts.values())
        self._slots += sum(state.batch[name].numel() for name in facts)
        self._kept_padded += any(batch.layout is None for packing in self._packings() for batch in packing.planned)
        labels = state.batch.get("labels") if self._heads and isinstance(state.batch, Mapping) else None
        if isinstance(labels, torch.Tensor) and labels.ndim == 2:
            on_host = self._host_counts().of(labels)
            total = count_labels(labels if on_host is None else on_host)
            self._labelled += total
            self._label_slots += labels.numel()
            for head in self._heads:
                head.plan(labels, total)

    def eval_before_forward(self, state: State) -> None:
        self._plan(state)

    predict_before_forward = eval_before_forward

    def batch_end(self, state: State) -> None:
        self._forget()  # not earlier, because the backward pass may recompute parts of the forward pass

    eval_after_forward = predict_after_forward = fit_end = batch_end

    def _plan(self, state: State) -> dict[str, MaskFacts]:
        """Plan the packing of the micro-batch on its device, and return what is known of its masks, by name."""
        packings = self._packings()
        if not packings:
            return {}
        facts = {name: self._facts(name, mask, state.batch) for name, mask in token_masks(state.batch).items()}
        for packing in packings:
            planned = []
            for name, fact in facts.items():
                mask = state.batch[name]
                labels = self._host_counts().labels_of(name, mask, state.batch)
                planned.append(PlannedBatch(mask, labels, packing.layout(mask.flatten(0, -2), fact.counts)))
            packing.plan(
                planned,
                [(state.batch[name], fact.counts) for name, fact in facts.items() if state.batch[name].ndim > 2],
            )
        return facts

    def _facts(self, name: str, mask: torch.Tensor, batch: Mapping[str, Any]) -> MaskFacts:
        host = self._host_counts()
        labels = host.labels_of(name, mask, batch)
        fact: MaskFacts | None = host.of(mask)
        if fact is not None and (labels is None or host.of(labels) is not None):
            return fact
        self._counted_on_device += mask.device.type != "cpu"
        return host.facts(mask, labels)

    def _host_counts(self) -> HostCounts:
        assert self._host is not None, "it is engaged"
        return self._host

    def _packings(self) -> list[Packing]:
        """Those of the encoders whose class was not restored."""
        return [encoder.packing for encoder in self._encoders if isinstance(encoder, UnpaddedEncoder)]

    def _count(self, mask: torch.Tensor, labels: torch.Tensor | None, tokens: Sequence[int]) -> list[int]:
        """See :meth:`.Packing.count`. A row stays padded if one of the encoders cannot pack it."""
        counts = [packing.count(mask, labels, tokens) for packing in self._packings()]
        return [min(row) for row in zip(*counts, strict=True)]  # STAYS_PADDED is the smallest

    def _forget(self) -> None:
        for head in self._heads:
            head.forget_plan()
        for packing in self._packings():
            packing.plan()

    def watch(self, state: State) -> None:
        self._first.watch(state, self._encoders, self.watching)

    def stop_watching(self, state: State) -> None:
        self._first.stop()

    def close(self) -> None:
        self._forget()
        if self._host is not None:
            self._host.close()
        super().close()

    def verify(self, state: State) -> dict[str, Any]:
        failure = self._first.failure()
        if failure is not None:
            raise self.not_engaged(*failure)
        evidence = self._first.evidence()
        if self._slots:
            evidence["padding_of_the_run"] = round(1 - self._tokens / self._slots, 4)
        if self.mlm_head == "labelled":
            if not any(head.ran for head in self._heads):
                raise self.not_engaged("the masked-LM head computed every token", "pass labels (B, S) to the model")
            evidence["head_tokens"] = (
                round(self._labelled / self._label_slots, 4)
                if self._label_slots
                else "unknown: the labels were counted in the forward pass"
            )
        if self._kept_padded:
            evidence["micro_batches_kept_padded"] = self._kept_padded
        if self._counted_on_device:
            evidence["masks_counted_on_the_device"] = self._counted_on_device
        return evidence
