"""The unpadding technique: the encoder runs on real tokens only."""

from __future__ import annotations

from typing import Any

import torch
from composer.core import State
from pydantic import Field

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, swap_encoders
from composer_speedups.algorithms.unpadding.evidence import FirstForward
from composer_speedups.algorithms.unpadding.functional import LARGEST_MULTIPLE
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.parity_checked_technique import ParityCheckedTechnique
from composer_speedups.core.technique import Conflict, Stage
from composer_speedups.families.labelled_head import (
    LabelledHead,
    MLMHead,
    count_labels,
    labelled_heads,
    plan_labels,
)
from composer_speedups.families.packed_encoder import Layout, UnpaddedEncoder, unpadded_encoders
from composer_speedups.families.packed_tokens import row_counts, token_masks

# Batch entries with lists: Composer splits them into micro-batches along with the tensors, and keeps them on the host.
_COUNTS = "unpadding_row_counts_of_"
_LABELLED = f"{_COUNTS}labels"
_KEPT = f"{_COUNTS}rows_kept_padded"


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

    pad_to_multiple_of: int = Field(64, ge=1, le=LARGEST_MULTIPLE)
    """Round the number of packed tokens up to a multiple of this."""

    mlm_head: MLMHead = Field("all")
    """Tokens for which a masked-LM head computes logits in training: all, or those with a label."""

    def reset(self) -> None:
        super().reset()
        self._encoders: list[UnpaddedEncoder] = []
        self._heads: list[LabelledHead] = []
        self._labelled = 0  # labelled tokens of the training batches
        self._first = FirstForward()
        self._tokens = self._slots = self._padded = 0  # totals of the training batches

    def engage(self, state: State) -> dict[str, Any]:
        with self.refusals():
            self.reapply(state)
        if self._heads and getattr(state.model, "get_metrics", lambda **_: {})(is_train=True):
            self.withdraw(state)
            raise TechniqueError(
                self.name,
                "with mlm_head: labelled, training computes no logits of other tokens, and training metrics read them",
                "set model.train_metrics: false (in a HuggingFaceModel, use eval_metrics only), or mlm_head: all",
            )
        return {"encoders": len(self._encoders)}

    def reapply(self, state: State) -> None:
        swap_encoders(state.model, self.pad_to_multiple_of, self.mlm_head, self.owner)
        self._encoders, self._heads = unpadded_encoders(state.model), labelled_heads(state.model)

    def withdraw(self, state: State) -> None:
        restore_encoders(state.model, self.owner)

    def own_batch(self, batch: Any) -> Any:
        if not isinstance(batch, dict):
            return batch
        return {name: value for name, value in batch.items() if not str(name).startswith(_COUNTS)}

    def batch_start(self, state: State) -> None:
        for counts, mask in self._count(state):
            self._tokens += sum(map(abs, counts))
            self._slots += mask.numel()
        labels = state.batch.get("labels") if self._heads and isinstance(state.batch, dict) else None
        if isinstance(labels, torch.Tensor) and labels.ndim == 2 and labels.device.type == "cpu":
            counted = count_labels(labels)
            self._labelled += sum(counted)
            state.batch = {**state.batch, _LABELLED: counted}

    def eval_batch_start(self, state: State) -> None:
        self._count(state)

    def before_forward(self, state: State) -> None:
        self._padded += self._plan(state)
        if isinstance(state.batch, dict) and (counts := state.batch.pop(_LABELLED, None)) is not None:
            for head in self._heads:
                head.plan = plan_labels(state.batch["labels"], sum(counts), self.pad_to_multiple_of)

    def eval_before_forward(self, state: State) -> None:
        self._plan(state)

    def after_forward(self, state: State) -> None:
        self._forget()

    def batch_end(self, state: State) -> None:
        self._forget(counts=True)  # not earlier, because the backward pass may recompute parts of the forward pass

    eval_after_forward = fit_end = batch_end

    def _count(self, state: State) -> list[tuple[list[int], torch.Tensor]]:
        """Count tokens while the batch is on the host, after all algorithms have changed it.

        Returns:
            For each mask on the host, the tokens of each row and the mask; negative for rows that begin with padding.
        """
        counted, known = [], [encoder for encoder in self._encoders if isinstance(encoder, UnpaddedEncoder)]
        for name, mask in token_masks(state.batch).items():
            if mask.device.type != "cpu":
                continue
            rows = mask.flatten(0, -2)
            counts = known[0].count(rows) if known else row_counts(rows)
            texts = len(rows) // len(mask)
            by_sample = counts if mask.ndim == 2 else [counts[i : i + texts] for i in range(0, len(rows), texts)]
            state.batch = {**state.batch, f"{_COUNTS}{name}": by_sample}
            labels = state.batch.get("labels") if mask.ndim == 2 else None
            if name == "attention_mask" and known and not (isinstance(labels, torch.Tensor) and labels.is_cuda):
                kept = known[0].reads_padding(rows, labels if isinstance(labels, torch.Tensor) else None)
                if any(kept):
                    state.batch[_KEPT] = [any(kept[i : i + texts]) for i in range(0, len(rows), texts)]
            counted.append((counts, mask))
        return counted

    def _plan(self, state: State) -> int:
        """Plan the packing of the micro-batch on its device from the counts in the batch.

        If a mask is not in the batch, the encoder counts its tokens.

        Returns:
            Number of padded layouts.
        """
        if not isinstance(state.batch, dict):
            return 0
        padded = 0
        plans: dict[UnpaddedEncoder, list[tuple[torch.Tensor, Layout]]] = {}
        known: dict[UnpaddedEncoder, list[tuple[torch.Tensor, list[int]]]] = {}
        keep_padded = any(state.batch.pop(_KEPT, ()))
        for name, mask in token_masks(state.batch).items():
            counts = state.batch.pop(f"{_COUNTS}{name}", None)
            if counts is None or len(counts) != len(mask):
                continue
            if mask.ndim > 2:
                counts = [count for sample in counts for count in sample]
            for encoder in self._encoders:
                if isinstance(encoder, UnpaddedEncoder):  # it was not restored
                    kept = keep_padded and name == "attention_mask"
                    layout: Layout = "padded" if kept else encoder.layout(mask.flatten(0, -2), counts)
                    if mask.ndim > 2 and not kept:
                        known.setdefault(encoder, []).append((mask, counts))
                    plans.setdefault(encoder, []).append((mask, layout))
                    padded += layout == "padded"
        for encoder, found in plans.items():
            encoder.plans, encoder.known_counts = tuple(found), tuple(known.get(encoder, ()))
        return padded

    def _forget(self, *, counts: bool = False) -> None:
        for head in self._heads:
            head.plan = None
        for encoder in self._encoders:
            encoder.plans = ()
            if counts:
                encoder.known_counts = ()

    def watch(self, state: State) -> None:
        self._first.watch(state, self._encoders)

    def stop_watching(self, state: State) -> None:
        self._first.stop()

    def close(self) -> None:
        self._first.stop()
        self._forget(counts=True)
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
            evidence["head_tokens"] = round(self._labelled / self._slots, 4) if self._slots else "counted on the GPU"
        if self._padded:
            evidence["micro_batches_left_padded"] = self._padded
        return evidence
