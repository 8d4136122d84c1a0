"""The unpadding technique: the encoder runs on real tokens only."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from composer.core import State
from pydantic import Field

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.algorithms.unpadding.functional import LARGEST_MULTIPLE
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.operator_recorder import OperatorRecorder
from composer_speedups.core.parity_checked_technique import ParityCheckedTechnique
from composer_speedups.core.technique import Conflict, Stage
from composer_speedups.core.trainer_state import is_compiled
from composer_speedups.families.blocks import blocks_of
from composer_speedups.kernels.observing import counting
from composer_speedups.packing.call import KnownBatch, know_batch, take_row_lengths
from composer_speedups.packing.encoder import UnpaddedEncoder, unpadded_encoders
from composer_speedups.packing.labelled_head import LabelledHead, MLMHead, labelled_heads
from composer_speedups.packing.layout import MULTIPLE, Layout
from composer_speedups.packing.rows import ROW_LABELS, as_numpy, count_rows, lengths_key, token_masks


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
        self._layout: Layout | None = None  # of the first training batch
        # totals of the training batches: real tokens and slots of the masks, labelled tokens and slots of the labels
        self._tokens = self._slots = self._labelled = self._label_slots = 0
        self._kept_padded = 0  # training micro-batches that an encoder could not pack
        self._uncounted = 0  # masks of micro-batches that have no row lengths
        self._seen: Counter[str] = Counter()  # what ran in the first forward pass
        self._operators: dict[str, int] = {}

    def engage(self, state: State) -> dict[str, Any]:
        with self.refusals():
            unpad(state.model, self.pad_to_multiple_of, self.mlm_head)
        self._encoders, self._heads = unpadded_encoders(state.model), labelled_heads(state.model)
        if self._heads and getattr(state.model, "get_metrics", lambda **_: {})(is_train=True):
            restore_encoders(state.model)
            raise TechniqueError(
                self.name,
                "with mlm_head: labelled, training computes no logits of other tokens, and training metrics read them",
                "set model.train_metrics: false (in a HuggingFaceModel, use eval_metrics only), or mlm_head: all",
            )
        return {"encoders": len(self._encoders)}

    def withdraw(self, state: State) -> None:
        restore_encoders(state.model)

    def after_dataloader(self, state: State) -> None:
        self._count(state)
        for name, mask in token_masks(state.batch).items():
            lengths = state.batch.get(lengths_key(name))
            if lengths is not None:
                counted = lengths if lengths.numpy().min(initial=0) >= 0 else as_numpy(mask) != 0
                self._tokens += int(counted.sum())
                self._slots += mask.numel()
        if self._heads and ROW_LABELS in state.batch:
            self._labelled += int(state.batch[ROW_LABELS].sum())
            self._label_slots += state.batch["labels"].numel()

    def eval_batch_start(self, state: State) -> None:
        self._count(state)

    def _count(self, state: State) -> None:
        """Add the row lengths to the batch, while it is on the CPU."""
        entries = count_rows(state.batch, self._rules(), labels=bool(self._heads))
        if entries:
            state.batch = copy.copy(state.batch)  # the loader's own object may come again
            state.batch.update(entries)

    def before_forward(self, state: State) -> None:
        known = self._take(state)
        self._layout = self._layout or next((rows.layout for rows in known.rows), None)
        self._kept_padded += any(rows.layout is None for rows in known.rows)
        self._uncounted += len(token_masks(state.batch)) - len(known.rows)

    def eval_before_forward(self, state: State) -> None:
        self._take(state)

    predict_before_forward = eval_before_forward

    def after_forward(self, state: State) -> None:
        know_batch(KnownBatch())

    eval_after_forward = predict_after_forward = batch_end = after_forward

    def _take(self, state: State) -> KnownBatch:
        """Take the row lengths out of the micro-batch on its device, for the forward pass that comes."""
        known = KnownBatch()
        if isinstance(state.batch, MutableMapping):
            known = take_row_lengths(state.batch, self._rules(), self.pad_to_multiple_of)
        know_batch(known)
        return known

    def _rules(self) -> list[Any]:
        return [encoder.packing.rules for encoder in self._encoders]

    def watch(self, state: State) -> None:
        self._seen = self.watching.enter_context(counting())
        if not is_compiled(state.model):  # Dynamo would not compile a frame under it
            self._operators = self.watching.enter_context(OperatorRecorder()).counts

    def verify(self, state: State) -> dict[str, Any]:
        layers = sum(len(blocks_of(encoder)) for encoder in self._encoders)
        evidence: dict[str, Any] = {"layers": layers}
        if is_compiled(state.model):
            evidence["attention"] = "compiled"
        else:
            self._check_first_forward(layers)
            evidence["attention"] = ", ".join(_attention(self._seen, self._operators))
        evidence |= _sizes(self._layout)
        if self._slots:
            evidence["padding_of_the_run"] = round(1 - self._tokens / self._slots, 4)
        if self.mlm_head == "labelled":
            if not self._seen["labelled_head"] and evidence["attention"] != "compiled":
                raise self.not_engaged("the masked-LM head computed every token", "pass labels (B, S) to the model")
            evidence["head_tokens"] = (
                round(self._labelled / self._label_slots, 4)
                if self._label_slots
                else "unknown: the labels were counted in the forward pass"
            )
        if self._kept_padded:
            evidence["micro_batches_kept_padded"] = self._kept_padded
        if self._uncounted:
            evidence["masks_counted_on_the_device"] = self._uncounted
        return evidence

    def _check_first_forward(self, layers: int) -> None:
        ran = self._seen
        if not ran["packed_encoder"]:
            if ran["padded_encoder"] and self._kept_padded:
                raise self.not_engaged(*_PADDED)
            how = "padded" if ran["padded_encoder"] else "without its encoder"
            raise self.not_engaged(f"the first forward pass ran {how}", "do not change attention and output settings")
        if ran["packed_layer"] < layers:
            reason = f"{ran['packed_layer']} of {layers} layers ran on packed tokens"
            raise self.not_engaged(reason, "do not change the encoder's layers")
        if not _attention(ran, self._operators):
            raise self.not_engaged("no variable-length attention ran", "do not change the model's attention")


_PADDED = (
    "the head reads padding (rows begin with padding, or padding has a label), or rows have holes, which change the "
    "distances between packed tokens",
    "pad on the right, without holes, and give padding the label -100",
)
# what reports itself → the name of its attention
_KERNELS = {
    "fused_layer": "fused_layers' own",
    "fused_layer_fp8": "fused_layers' own",
    "biased_attention": "biased_attention",
    "disentangled_attention": "disentangled_attention",
}


def _attention(ran: Counter[str], operators: dict[str, int]) -> list[str]:
    """The attention kernels and operators that ran."""
    known = [name for name in operators if name.startswith(("_scaled_dot_product", "_flash_attention_forward"))]
    # SDPA's math kernel is decomposed before dispatch; no other attention uses this softmax operator.
    found = sorted(name.strip("_") for name in known) or ["scaled_dot_product_math"] * ("_safe_softmax" in operators)
    return [*dict.fromkeys(title for name, title in _KERNELS.items() if ran[name]), *found]


def _sizes(layout: Layout | None) -> dict[str, Any]:
    """What the first batch was packed to."""
    if layout is None:
        return {}
    slots, packed, tokens = layout.mask_BS.numel(), len(layout.indices_T), int(layout.mask_BS.sum())
    sizes: dict[str, Any] = {
        "first_batch_slots": slots,
        "first_batch_tokens": tokens,
        "first_batch_packed": packed,
    }
    if tokens == slots:
        sizes["note"] = "the first batch has no padding to remove"
    elif packed >= slots:
        sizes["note"] = "the first batch is no smaller packed than padded; lower pad_to_multiple_of"
    return sizes
