"""The unpadding technique: the encoder runs on real tokens only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.technique import ComparedTechnique, Order

if TYPE_CHECKING:
    import torch

    from composer_speedups.algorithms.unpadding.host_counts import HostCounts, MaskFacts
    from composer_speedups.core.run import FirstBatch, Run
    from composer_speedups.packing.encoder import UnpaddedEncoder
    from composer_speedups.packing.labelled_head import LabelledHead
    from composer_speedups.packing.planning import Packing


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

    pad_to_multiple_of: int = Field(64, ge=1, le=65536)
    """Round the number of packed tokens up to a multiple of this."""

    mlm_head: Literal["all", "labelled"] = Field("all")
    """Tokens for which a masked-LM head computes logits in training: all, or those with a label."""

    def reset(self) -> None:
        super().reset()
        self._encoders: list[UnpaddedEncoder] = []
        self._heads: list[LabelledHead] = []
        self._host: HostCounts | None = None
        self._counted_on_device = 0  # masks of micro-batches whose tokens were counted on the device
        self._first: dict[str, Any] = {}  # of the first batch
        # totals of the training batches: real tokens and slots of the masks, labelled tokens and slots of the labels
        self._tokens = self._slots = self._labelled = self._label_slots = 0
        self._kept_padded = 0  # training micro-batches that an encoder could not pack

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, swap_encoders
        from composer_speedups.algorithms.unpadding.first_calls import compare_first_calls, stop_comparing
        from composer_speedups.algorithms.unpadding.host_counts import HostCounts
        from composer_speedups.core.stock import changes_to
        from composer_speedups.packing.encoder import unpadded_encoders
        from composer_speedups.packing.labelled_head import labelled_heads

        model = run.model
        if self.mlm_head == "labelled" and getattr(model, "get_metrics", lambda **_: {})(is_train=True):
            raise self.refusal(
                "with mlm_head: labelled, training computes no logits of other tokens, and training metrics read them",
                "set model.train_metrics: false (in a HuggingFaceModel, use eval_metrics only), or mlm_head: all",
            )
        # the first batch is compared; later ones may read padding
        guard = run.state is not None and (
            self.check == "always" or (self.check == "auto" and bool(changes_to(run.model)))
        )
        try:
            check = "never" if run.state is not None else self.check
            swap_encoders(model, self.pad_to_multiple_of, self.mlm_head, check=check, guard=guard)
        except ValueError as error:
            reason = str(error).removeprefix("unpadding ")
            raise self.refusal(reason, "remove it for this model") from error
        run.give_back(restore_encoders, model)
        if run.state is None:
            compare_first_calls(model, check, restore_encoders)
            run.give_back(stop_comparing, model)
        self._encoders, self._heads = unpadded_encoders(model), labelled_heads(model)
        if run.state is not None:
            self._host = HostCounts(run.state.device, self._count)
            run.give_back(self._host.close)
        run.give_back(self._forget)
        return {"encoders": len(self._encoders)}

    def before_forward(self, run: Run) -> None:
        import torch

        from composer_speedups.packing.labelled_head import count_labels

        assert run.state is not None
        batch, facts = run.state.batch, self._plan(run)
        if run.observing:
            self._note_first()
        self._tokens += sum(fact.tokens for fact in facts.values())
        self._slots += sum(batch[name].numel() for name in facts)
        self._kept_padded += any(planned.layout is None for packing in self._packings() for planned in packing.planned)
        labels = batch.get("labels") if self._heads and isinstance(batch, Mapping) else None
        if isinstance(labels, torch.Tensor) and labels.ndim == 2:
            on_host = self._host_counts().of(labels)
            total = count_labels(labels if on_host is None else on_host)
            self._labelled += total
            self._label_slots += labels.numel()
            for head in self._heads:
                head.plan(labels, total)

    def eval_before_forward(self, run: Run) -> None:
        self._plan(run)

    predict_before_forward = eval_before_forward

    def batch_end(self, run: Run) -> None:
        self._forget()  # not earlier, because the backward pass may recompute parts of the forward pass

    eval_after_forward = predict_after_forward = fit_end = batch_end

    def _plan(self, run: Run) -> dict[str, MaskFacts]:
        """Plan the packing of the micro-batch on its device, and return what is known of its masks, by name."""
        from composer_speedups.packing.planning import PlannedBatch
        from composer_speedups.packing.tokens import token_masks

        assert run.state is not None
        packings, batch = self._packings(), run.state.batch
        if not packings:
            return {}
        facts = {name: self._facts(name, mask, batch) for name, mask in token_masks(batch).items()}
        for packing in packings:
            planned = []
            for name, fact in facts.items():
                mask = batch[name]
                labels = self._host_counts().labels_of(name, mask, batch)
                planned.append(PlannedBatch(mask, labels, packing.layout(mask.flatten(0, -2), fact.counts)))
            packing.plan(
                planned,
                [(batch[name], fact.counts) for name, fact in facts.items() if batch[name].ndim > 2],
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
        from composer_speedups.packing.encoder import UnpaddedEncoder

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

    def _note_first(self) -> None:
        """The layout of an observed batch."""
        layouts = [planned.layout for packing in self._packings() for planned in packing.planned]
        if not layouts or (layout := layouts[0]) is None:
            self._first = {}
            return
        slots, packed, tokens = layout.mask_BS.numel(), len(layout.indices_T), int(layout.mask_BS.sum())
        self._first = {"first_batch_slots": slots, "first_batch_tokens": tokens, "first_batch_packed": packed}
        if tokens == slots:
            self._first["note"] = "the first batch has no padding to remove"
        elif packed >= slots:
            self._first["note"] = "the first batch is no smaller packed than padded; lower pad_to_multiple_of"

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        from composer_speedups.core.trainer_state import is_compiled
        from composer_speedups.families.blocks import blocks_of

        ran = {encoder.ran for encoder in self._encoders}
        if ran != {"unpadded"}:
            if self._kept_padded:
                raise self.no_effect(*self._encoders[0].packing.padded_because)
            how = "padded" if "padded" in ran else "without its encoder"
            raise self.no_effect(f"the first forward pass ran {how}", "do not change attention and output settings")
        layers = [layer for encoder in self._encoders for layer in blocks_of(encoder)]
        own = {str(layer.own_attention) for layer in layers if getattr(layer, "own_attention", None)}
        operators = sorted(own) + _attention_among(seen.operators)
        if not operators and not is_compiled(run.model):
            raise self.no_effect("no variable-length attention ran", "do not change the model's attention")
        evidence = {"layers": len(layers), "attention": ", ".join(operators) or "not seen in compiled code"}
        if self.mlm_head == "labelled" and not any(head.ran for head in self._heads):
            raise self.no_effect("the masked-LM head computed every token", "pass labels (B, S) to the model")
        return {**evidence, **self._first, **self.summary(run)}

    def summary(self, run: Run) -> dict[str, Any]:
        evidence: dict[str, Any] = {}
        if self._slots:
            evidence["padding_of_the_run"] = round(1 - self._tokens / self._slots, 4)
        if self.mlm_head == "labelled":
            unknown = "unknown: the labels were counted in the forward pass"
            evidence["head_tokens"] = round(self._labelled / self._label_slots, 4) if self._label_slots else unknown
        if self._kept_padded:
            evidence["micro_batches_kept_padded"] = self._kept_padded
        if self._counted_on_device:
            evidence["masks_counted_on_the_device"] = self._counted_on_device
        return evidence


def _attention_among(operators: Mapping[str, int]) -> list[str]:
    """The attention operators among those that ran."""
    prefixes = ("_scaled_dot_product", "_flash_attention_forward", "disentangled_attention", "biased_attention")
    known = sorted(name.strip("_") for name in operators if name.startswith(prefixes) and "backward" not in name)
    # SDPA's math kernel is decomposed before dispatch; no other attention uses this softmax operator.
    return known or ["scaled_dot_product_math"] * ("_safe_softmax" in operators)
