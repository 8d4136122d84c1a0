"""The unpadding technique: the encoder runs on real tokens only."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import NOT_YET, ComparedTechnique, Order

if TYPE_CHECKING:
    from composer_speedups.packing.call import KnownBatch
    from composer_speedups.packing.encoder import UnpaddedEncoder
    from composer_speedups.packing.rows import RowLengths, RowRules


class Unpadding(ComparedTechnique):
    """Runs the encoder on real tokens only, with variable-length attention.

    Raises:
        Refusal: At INIT, for an unsupported model or head; in the first batch, for a custom model that reads hidden
            states of padding.

    Source: padding-free batches of Zeng et al., arXiv 2208.08124.
    """

    name = "unpadding"
    order = Order.LAYERS
    effect = "rounding"
    not_with: ClassVar = {"sdpa_attention": "both replace the model's attention; unpadding brings its own"}

    pad_to_multiple_of: int | None = Field(None, ge=1, le=65536)
    """Round the number of packed tokens up to a multiple of this; null: 64, or coarser with cuda_graphs."""

    mlm_head: Literal["all", "labelled"] = Field("all")
    """Tokens for which a masked-LM head computes logits in training: all, or those with a label."""

    def reset(self) -> None:
        super().reset()
        self._encoders: list[UnpaddedEncoder] = []
        self._rules: list[RowRules] = []  # of the encoders
        self._counts_labels = False
        self._multiple = self.pad_to_multiple_of  # None: such that nearly all batches have one of a few sizes
        self._observed: list[tuple[int, ...]] = []  # slots, tokens and packed tokens of the observed micro-batches
        # totals of the training batches: real tokens and slots of the masks, labelled tokens and slots of the labels
        self._tokens = self._slots = self._labelled = self._label_slots = 0
        # training micro-batches that an encoder could not pack, and masks of micro-batches without row lengths
        self._kept_padded = self._uncounted = 0

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
        from composer_speedups.packing.encoder import labelled_heads, unpadded_encoders
        from composer_speedups.packing.layout import MULTIPLE, SIZES

        if self.mlm_head == "labelled" and getattr(run.model, "get_metrics", lambda **_: {})(is_train=True):
            raise self.refusal(
                "with mlm_head: labelled, training computes no logits of other tokens, and training metrics read them",
                "set model.train_metrics: false (in a HuggingFaceModel, use eval_metrics only), or mlm_head: all",
            )
        # In a Trainer, the host compares the first batch with its loss.
        check = self.check if run.in_other_loop else "never"
        if "cuda_graphs" not in run.techniques:
            self._multiple = self._multiple or MULTIPLE
        try:
            unpad(run.model, self._multiple, self.mlm_head, check=check)
        except ValueError as error:
            reason = str(error).removeprefix("unpadding ")
            raise self.refusal(reason, "remove it for this model") from error
        run.give_back(restore_encoders, run.model)
        self._encoders, self._counts_labels = unpadded_encoders(run.model), bool(labelled_heads(run.model))
        self._rules = [*{encoder.packing.rules for encoder in self._encoders}]
        self._sizes = SIZES
        return {"encoders": len(self._encoders)}

    def fit_start(self, run: Run) -> None:
        """Allow more packed sizes in a long job: fewer unused entries save more time than more captures take."""
        from composer_speedups.core.trainer_state import last_batch

        graphs = getattr(run.techniques.get("cuda_graphs"), "max_graphs", 0)
        batches = (last_batch(run.state) or 0) / run.ranks  # type: ignore[arg-type]
        # The best number for 64 rows, if a capture takes as long as ten batches. Ranks wait for each other's captures.
        self._sizes = max(self._sizes, min(int(batches**0.5 / 8), graphs - 1))

    def after_dataloader(self, run: Run) -> None:
        from composer_speedups.packing.rows import ROW_LABELS, as_numpy, counted_values

        self._observed, entries = [], self._count(run)
        for name, lengths in entries.items():
            values, counts = run.state.batch[counted_values(name)], lengths.numpy()  # type: ignore[union-attr]
            if name == ROW_LABELS:
                self._labelled += int(counts.sum())
                self._label_slots += values.numel()
            else:
                self._tokens += int((counts if counts.min() >= 0 else as_numpy(values) != 0).sum())
                self._slots += values.numel()

    def eval_batch_start(self, run: Run) -> None:
        self._count(run)

    def _count(self, run: Run) -> dict[str, RowLengths]:
        """Add the row lengths to the batch, while it is on the CPU, and return them."""
        from composer_speedups.packing.rows import count_rows

        assert run.state is not None
        if entries := count_rows(run.state.batch, self._rules, labels=self._counts_labels):
            run.state.batch = copy.copy(run.state.batch)  # the loader's own object may come again
            run.state.batch.update(entries)
        return entries

    def before_forward(self, run: Run) -> None:
        known = self._take(run)
        if run.observing:
            for rows, lengths in zip(known.rows, known.lengths, strict=True):
                if rows.packed is not None:
                    self._observed.append((rows.values.numel(), int(lengths.numpy().sum()), len(rows.packed)))
        self._kept_padded += any(rows.packed is None for rows in known.rows)
        self._uncounted += known.uncounted

    def eval_before_forward(self, run: Run) -> None:
        self._take(run)

    predict_before_forward = eval_before_forward

    def after_forward(self, run: Run) -> None:
        from composer_speedups.packing.call import KnownBatch, know_batch

        know_batch(KnownBatch())

    eval_after_forward = predict_after_forward = batch_end = after_forward

    def _take(self, run: Run) -> KnownBatch:
        """Take the row lengths out of the micro-batch on its device, for the forward pass that comes."""
        from composer_speedups.packing.call import KnownBatch, know_batch, take_row_lengths

        assert run.state is not None
        batch, known = run.state.batch, KnownBatch()
        if isinstance(batch, Mapping):
            known = take_row_lengths(batch, self._multiple, self._sizes)  # type: ignore[arg-type]
        know_batch(known)
        return known

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        from composer_speedups.core.trainer_state import is_compiled
        from composer_speedups.families.blocks import blocks_of

        numbers = [len(blocks_of(encoder)) for encoder in self._encoders]
        layers = sum(numbers)
        attention = _attention_among(seen) or ["not seen in compiled code"]
        compiled = is_compiled(run.model)
        if not compiled and not seen.ran["packed_encoder"]:
            if seen.ran["waits_for_gradients"]:
                return NOT_YET
            if seen.ran["padded_encoder"] and (seen.ran["kept_padded"] or seen.ran["counted_in_the_call"]):
                raise self.no_effect(*_PADDED)
            how = "padded" if seen.ran["padded_encoder"] else "without its encoder"
            fix = "ask for no hidden states or attentions, keep its attention, and do not compile it afterwards"
            raise self.no_effect(f"the first forward pass ran {how}", fix)
        called = seen.ran["packed_encoder"] * min(numbers)  # once for each micro-batch; at least, with several encoders
        ran = seen.ran["packed_layer"] + seen.ran["cached_block"]  # those whose outputs layer_freezing keeps
        if not compiled and ran < called:
            reason = f"{ran} of {called} calls of layers ran on packed tokens"
            raise self.no_effect(reason, "do not change the encoder's layers")
        if self.mlm_head == "labelled" and not seen.ran["labelled_head"] and not compiled:
            raise self.no_effect("the masked-LM head computed every token", "pass labels (B, S) to the model")
        names = ("first_batch_slots", "first_batch_tokens", "first_batch_packed")
        sizes = dict(zip(names, map(sum, zip(*self._observed, strict=True)), strict=False))
        return {"layers": layers, "attention": ", ".join(attention), **sizes, **self.summary(run)}

    def summary(self, run: Run) -> dict[str, Any]:
        from composer_speedups.packing.rows import token_masks

        evidence: dict[str, Any] = {}
        if self._slots:
            evidence["padding_of_the_run"] = round(1 - self._tokens / self._slots, 4)
        elif run.state is not None and isinstance(run.state.batch, Mapping) and not token_masks(run.state.batch):
            evidence["padding_of_the_run"] = "unknown: the batches have no attention_mask, so every slot is a token"
        if self.mlm_head == "labelled":
            evidence["head_tokens"] = round(self._labelled / self._label_slots, 4) if self._label_slots else "unknown"
        if self._kept_padded:
            evidence["micro_batches_kept_padded"] = self._kept_padded
        if self._uncounted:
            evidence["masks_counted_on_the_device"] = self._uncounted
        return evidence


_PADDED = (
    "the head reads padding (rows begin with padding, or padding has a label), or rows have holes, which change the "
    "distances between packed tokens",
    "pad on the right, without holes, and give padding the label -100",
)
# what this package's code reports → the name of its attention
_KERNELS = {
    "fused_layer": "fused_layers' own",
    "fused_layer_fp8": "fused_layers' own",
    "biased_attention": "biased_attention",
    "disentangled_attention": "disentangled_attention",
}


def _attention_among(seen: FirstBatch) -> list[str]:
    """The attention kernels and operators that ran."""
    own = dict.fromkeys(title for name, title in _KERNELS.items() if seen.ran[name])
    prefixes = ("_scaled_dot_product", "_flash_attention_forward")
    known = sorted(n.strip("_") for n in seen.operators if n.startswith(prefixes) and "backward" not in n)
    # SDPA's math kernel is decomposed before dispatch; no other attention uses this softmax operator.
    return [*own, *(known or ["scaled_dot_product_math"] * ("_safe_softmax" in seen.operators))]
