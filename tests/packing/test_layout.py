"""Layouts of real tokens, gathering and scattering; and row lengths, counted on the CPU, which travel in the batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from composer.core.data_spec import _default_split_batch
from composer.devices import DeviceCPU
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from composer_speedups import with_row_lengths
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.packing import attention
from composer_speedups.packing.attention import supports_flash_attention, unpadded_attention
from composer_speedups.packing.call import KnownBatch, take_row_lengths, with_known_batch
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.layout import Layout, lay_out, multiple_for, packed_tokens, round_up
from composer_speedups.packing.rows import (
    ROW_LABELS,
    RowLengths,
    RowRules,
    count_rows,
    lengths_key,
    row_lengths,
    token_masks,
)
from tests.helpers.common import Batch, batch, tiny_bert
from tests.helpers.masks import random_masks
from tests.helpers.models import fit_batches, tiny_model
from tests.helpers.unpadded import compared, observed, pair, way
from tests.reference.tolerance import assert_near


def test_a_plan_and_its_errors() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 1]])
    plan = lay_out(mask, 8, 4)
    assert plan.indices_T.tolist() == [0, 1, 6, 8, 10, 11, 12, 12]
    assert plan.cu_seqlens.tolist() == [0, 2, 2, 4, 6, 8, 8]
    assert lay_out(mask, 11, 6).cu_seqlens.tolist() == [0, 2, 2, 4, 6, 9, 11]
    assert plan.cu_seqlens.dtype == torch.int32
    assert plan.longest >= 3
    assert lay_out(mask, 6, 3).indices_T.tolist() == [0, 1, 6, 8, 10, 11]
    wide = torch.ones(1, 300, dtype=torch.bool)
    wide[0, 50:] = False
    assert lay_out(wide, 350, 300).cu_seqlens.tolist() == [0, 50, 178, 306, 350], "short ones, for attention's sake"
    for wrong in (5, 0, 6 + 2 * 3 + 1):
        with pytest.raises(RuntimeError, match="changed after their tokens were counted"):
            lay_out(mask, wrong, 4)
    size = torch.Size((13, 10))
    assert [packed_tokens(real, size, 100) for real in (0, 1, 100, 101, 130)] == [100, 100, 100, 192, 192]


@pytest.mark.parametrize(
    ("rows", "width", "multiple"),
    [(1, 64, 128), (40, 64, 128), (32, 128, 256), (16, 256, 384), (40, 256, 512), (128, 256, 1024), (256, 256, 1408),
     (40, 512, 1024), (128, 512, 1920)],
)  # fmt: skip
def test_five_numbers_of_tokens_serve_nearly_all_batches(rows: int, width: int, multiple: int) -> None:
    assert multiple_for(torch.Size((rows, width)), None) == multiple
    assert multiple_for(torch.Size((rows // 2 or 1, 2 if rows > 1 else 1, width)), None) == multiple
    assert multiple_for(torch.Size((rows, width)), 24) == 24
    generator = torch.Generator().manual_seed(rows)
    # rows of 0.3 to 1 of the width, half of which are cut there, with a standard deviation of a quarter of it
    lengths = (width * (0.3 + torch.rand(400, rows, generator=generator) * 1.4)).clamp(max=width).long()
    totals = [packed_tokens(int(real), torch.Size((rows, width)), None) for real in lengths.sum(-1)]
    assert len({*totals}) <= 6
    frequent = [number for number in {*totals} if totals.count(number) > 4]
    assert len(frequent) <= 5
    assert all(number % 64 == 0 for number in totals)
    short = [packed_tokens(7 * rows, torch.Size((rows, width)), None), round_up(7 * rows, 128)]
    assert short[0] <= short[1], "many slots do not make short rows long"
    assert all(0 <= number - real < multiple for number, real in zip(totals, lengths.sum(-1).tolist(), strict=True))


def laid_out(mask: Tensor, multiple: int) -> Layout:
    return lay_out(mask, packed_tokens(int(mask.sum()), mask.shape, multiple), multiple)


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_gathering_and_scattering_are_inverse_and_each_others_gradient(multiple: int) -> None:
    """For masks of every kind: real tokens come back to their slots, in double precision and in order."""
    for seed, mask in enumerate(random_masks(36)):
        layout = laid_out(mask, multiple)
        generator = torch.Generator().manual_seed(seed)
        x_BSH = torch.randn(*mask.shape, 3, dtype=torch.double, generator=generator, requires_grad=True)
        packed = layout.gather(x_BSH)
        real = mask.bool()
        torch.testing.assert_close(packed[: int(real.sum())], x_BSH[real], rtol=0, atol=0)
        back = layout.scatter(packed)
        torch.testing.assert_close(back, x_BSH * real[..., None], rtol=0, atol=0)
        weights = torch.randn(back.shape, dtype=torch.double, generator=generator)
        (gradient,) = torch.autograd.grad((back * weights).sum(), x_BSH)
        torch.testing.assert_close(gradient, weights * real[..., None], rtol=0, atol=0)
        assert layout.cu_seqlens.diff()[: len(mask)].tolist() == mask.sum(-1).tolist()
        ids = torch.arange(mask.numel()).view(mask.shape)
        assert layout.pick(ids)[0, : int(real.sum())].tolist() == ids[real].tolist()


class FlashCalls(TorchDispatchMode):
    """Records the windows of flash attention's calls, and the other settings of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any, Any]] = []
        self.settings: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "flash" in str(func):
            name = func.overloadpacket.__name__
            self.seen.append((name, kwargs.get("window_size_left"), kwargs.get("window_size_right")))
            if name == "_flash_attention_forward":
                self.settings = [*args[5:], kwargs.get("scale")]
        return func(*args, **kwargs)


def test_triton_needs_its_package_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, missing, runs in ((object(), None, True), (None, None, False), (object(), "no compiler", False)):
        monkeypatch.setattr(attention, "find_spec", lambda _, package=package: package)
        monkeypatch.setattr(attention, "missing_c_compiler", lambda missing=missing: missing)
        assert attention._runs_triton.__wrapped__() is runs


@pytest.mark.parametrize(("sliding_window", "reach"), [(None, None), (5, 4)])
def test_the_flash_call_has_the_right_signature_shapes_and_window(
    sliding_window: int | None, reach: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed: torch's meta kernel checks the call and returns tensors of the right shapes."""
    monkeypatch.setattr("composer_speedups.packing.attention.supports_flash_attention", lambda *_: True)
    meta: dict[str, Any] = {"device": "meta"}
    mask, indices = torch.empty(3, 9, dtype=torch.bool, **meta), torch.empty(64, dtype=torch.long, **meta)
    layout = Layout(mask, indices, torch.empty(5, dtype=torch.int32, **meta), 128)
    query = torch.empty(1, 2, 64, 16, dtype=torch.bfloat16, **meta, requires_grad=True)
    with FlashCalls() as calls:
        output, weights = unpadded_attention(
            nn.Identity(), query, query, query, None, 0.1, 0.25, layout, sliding_window
        )
        output.sum().backward()
    assert (output.shape, output.dtype, weights) == ((1, 64, 2, 16), torch.bfloat16, None)
    assert query.grad.shape == query.shape
    names = ["_flash_attention_forward", "_flash_attention_backward"]
    longest, dropout, causal, debug_mask = 128, 0.1, False, False
    assert calls.settings == [longest, longest, dropout, causal, debug_mask, 0.25]
    assert calls.seen == [(name, reach, reach) for name in names]


@pytest.mark.exhaustive
def test_shared_key_heads_of_as_many_tokens_as_query_heads() -> None:
    """Two key heads serve four query heads; sizes that are equal by chance must not be mistaken for each other."""
    layout = lay_out(torch.ones(2, 2, dtype=torch.long), 4, 1)
    query, key, value = (torch.randn(1, heads, 4, 8) for heads in (4, 2, 2))
    output, _ = unpadded_attention(nn.Identity(), query, key, value, None, layout=layout)
    rows = [x.repeat_interleave(4 // x.shape[1], 1).view(4, 2, 2, 8) for x in (query, key, value)]  # (A, B, S, D)
    expected = nn.functional.scaled_dot_product_attention(*rows).view(4, 4, 8).transpose(0, 1)
    torch.testing.assert_close(output[0], expected)


def test_the_flash_kernel_needs_a_gpu_half_precision_and_a_supported_head_size() -> None:
    assert not supports_flash_attention(torch.device("cpu"), torch.bfloat16, 64)
    assert not supports_flash_attention(torch.device("cuda"), torch.float32, 64)
    assert not supports_flash_attention(torch.device("cuda"), torch.bfloat16, 20)


@pytest.mark.parametrize(("width", "multiple"), [(9, 1), (9, 256), (128, 64), (129, 64), (200, 64), (200, 1024)])
def test_longest_covers_every_row_and_is_a_multiple_of_128(width: int, multiple: int) -> None:
    """The kernels read ``longest`` tokens per row, including the rows of filler tokens at the end of T."""
    mask = torch.ones(1, width, dtype=torch.long)
    mask[0, 1:] = multiple <= width  # one real token, all others are filler
    plan = laid_out(mask, multiple)
    assert plan.longest >= int(plan.cu_seqlens.diff().max())
    assert plan.longest % 128 == 0
    assert plan.longest - width < 128
    assert int(plan.cu_seqlens.diff().max()) <= width


ANY, FIRST, TOKENS, NEAR = RowRules(), RowRules(head_reads_first_slot=True), RowRules(True), RowRules(False, False, 0)
MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1], [1, 0, 1]])


def lengths(batch: Any, *rules: RowRules, mask: str = "attention_mask") -> Any:
    return count_rows(batch, rules)[lengths_key(mask)].tolist()


@pytest.mark.parametrize(
    ("rules", "labels", "expected"),
    [
        ([ANY], None, [2, 0, 2, 2]),
        ([FIRST], None, [2, -1, -1, 2]),
        ([FIRST], [0, 1, 0, 1], [2, -1, -1, 2]),
        ([FIRST], [0, -100, -100, 1], [2, 0, -1, 2]),  # the row without tokens is ignored
        ([FIRST], [0.0, -100.0, 1.0, 1.0], [2, -1, -1, 2]),  # a regression has no label to ignore
        ([FIRST], [[1.0] * 3] * 4, [2, -1, -1, 2]),  # as many labels as slots
        ([TOKENS], [[1, 1, -100], [-100] * 3, [-100, 1, 1], [1, -100, 1]], [2, 0, 2, 2]),
        ([TOKENS], [[1, 1, 1], [-100] * 3, [0, 1, 1], [1, 1, 1]], [-1, 0, -1, -1]),
        ([ANY], [[1] * 3] * 4, [2, 0, 2, 2]),
        ([NEAR], None, [2, 0, 2, -1]),  # holes change distances
        ([RowRules(False, False, 3)], None, [2, 0, 2, 2]),  # but not in rows that are this narrow
        ([FIRST, NEAR], None, [2, -1, -1, -1]),  # as the strictest of several encoders
    ],
)
def test_rows_that_the_head_or_distances_forbid_to_pack_stay_padded(rules: Any, labels: Any, expected: Any) -> None:
    given = {"input_ids": MASK, "attention_mask": MASK}
    assert lengths(given | ({} if labels is None else {"labels": torch.tensor(labels)}), *rules) == expected


def test_each_mask_of_a_batch_has_its_lengths() -> None:
    texts = torch.stack([MASK, MASK.flip(0)], 1)
    given = {"input_ids": MASK, "attention_mask": MASK, "b_input_ids": texts, "b_attention_mask": texts}
    given |= {"attention_mask_4d": torch.ones(4, 1, 3, 3), "empty_attention_mask": torch.ones(0, 3), "labels": MASK}
    given["flat_attention_mask"] = torch.ones(4)
    given |= {"c_input_ids": MASK, "c_attention_mask": texts}  # of another shape than the ids
    counted = count_rows(given, [ANY], labels=True)
    assert {name: tuple(values.shape) for name, values in counted.items()} == {
        "_row_lengths": (4,),
        "b__row_lengths": (4, 2),
        ROW_LABELS: (4,),
    }
    assert counted["b__row_lengths"].tolist() == [[2, 2], [0, 2], [2, 0], [2, 2]]
    assert count_rows([given], [ANY]) == token_masks([given]) == {}


def test_they_stay_on_the_cpu_and_are_divided_with_their_rows() -> None:
    counted: Any = {**batch([5, 12, 9, 3]), **count_rows(batch([5, 12, 9, 3]), [ANY])}
    key = lengths_key("attention_mask")
    moved = counted[key].to("meta", non_blocking=True)
    assert moved is counted[key]
    assert counted[key].dtype is torch.int32
    micro = [DeviceCPU().batch_to_device(part) for part in _default_split_batch(counted, 3)]
    assert [part[key].tolist() for part in micro] == [[5, 12, 9], [3]]
    for part in (copy.deepcopy(micro[0]), pickle.loads(pickle.dumps(micro[0]))):
        assert type(part[key]) is RowLengths
        assert part[key].tolist() == [5, 12, 9]


def test_lengths_in_a_batch_are_counted_again_only_for_losses_per_token() -> None:
    inputs: Any = batch([5, 3])
    inputs |= {
        "_row_lengths": row_lengths(np.array([4, 3])),
        "labels": torch.zeros(inputs["input_ids"].shape, dtype=torch.long),
    }
    assert count_rows(inputs, [ANY])["_row_lengths"] is inputs["_row_lengths"]
    per_token = RowRules(head_has_token_loss=True)
    assert count_rows(inputs, [ANY, per_token])["_row_lengths"].tolist() == [5, -1], "padding has labels"
    inputs["_row_lengths"] = row_lengths(np.array([5, 0]))
    assert count_rows(inputs, [ANY])["_row_lengths"].tolist() == [5, 3], "a row without tokens may have to stay padded"


@pytest.mark.parametrize("family", ["bert", "modernbert", "t5"])
def test_a_collator_counts_for_a_loop_of_ones_own(family: Any) -> None:
    reference, model = pair(family, "tokens")
    rows = [{name: values[i] for name, values in batch([5, 12, 9, 3]).items()} for i in range(4)]
    collate = with_row_lengths(torch.utils.data.default_collate, model)
    for given in DataLoader(rows, batch_size=3, collate_fn=collate):  # type: ignore[arg-type]
        mask = given["attention_mask"]
        given["labels"] = (given["input_ids"] % 2).masked_fill(mask == 0, -100)
        plain = {name: values for name, values in given.items() if name != "_row_lengths"}

        def loss(module: Any, given: Any = given, plain: Any = plain) -> Tensor:
            return module(**(given if module is model else plain)).loss  # type: ignore[no-any-return]

        assert compared(reference, model, loss) == "packed"
        ran = observed(lambda given=given: model(**given))  # type: ignore[misc]
        assert not ran["counted_in_the_call"], "it would wait for a GPU"
    with pytest.raises(ValueError, match="the model does not run unpadded"):
        with_row_lengths(collate, reference)


def taken(model: Any, inputs: Batch, change: Any = None) -> KnownBatch:
    """What a forward pass knows of a batch that may have changed after its rows were counted."""
    rules = [encoder.packing.rules for encoder in unpadded_encoders(model)]
    counted: Any = {**inputs, **count_rows(inputs, rules, labels=True)}
    return take_row_lengths(counted | (change or {}), 8)


@pytest.mark.parametrize(
    ("family", "head", "change"),
    [
        ("bert", "classification", lambda inputs: inputs["attention_mask"].copy_(inputs["attention_mask"].flip(1))),
        ("bert", "classification", lambda inputs: inputs["attention_mask"][0].zero_()),
        ("deberta_v2", "mlm", lambda inputs: inputs["attention_mask"][1, 3].zero_()),
        ("bert", "mlm", lambda inputs: inputs["attention_mask"].fill_(1)),
        ("bert", "mlm", lambda inputs: inputs["labels"].copy_(inputs["input_ids"])),
        ("bert", "tokens", lambda inputs: inputs["labels"][0].fill_(1)),
    ],
    ids=["first slots", "a row without tokens", "a hole", "more tokens", "more labels", "a label at padding"],
)
def test_rows_that_changed_after_they_were_counted_and_cannot_be_packed_are_an_error(
    family: Any, head: Any, change: Any
) -> None:
    model = tiny_model(family, head)
    unpad(model, 8, "labelled" if head == "mlm" else "all")
    inputs = batch([5, 12, 9])
    if head == "tokens":
        inputs["labels"] = (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)
    (inputs,) = fit_batches(model, [inputs])
    with with_known_batch(taken(model.train(), inputs)):
        model(**inputs)
        change(inputs)
        with pytest.raises(RuntimeError, match="changed after their tokens were counted"):
            model(**inputs)


def test_rows_that_changed_after_they_were_counted_are_packed_as_they_are() -> None:
    reference, model = pair("bert", "mlm")
    (inputs,) = fit_batches(reference, [batch([5, 12, 9])])
    with with_known_batch(taken(model, inputs)):
        inputs["attention_mask"][1, 3:7] = 0
        inputs["labels"][1, 3:7] = -100
        ran = observed(lambda: compared(reference, model, lambda network: network(**inputs).loss))
    assert (way(ran), ran["counted_in_the_call"]) == ("packed", 0)


def test_a_call_with_another_mask_counts_its_own_tokens() -> None:
    reference, model = pair()
    known, other = batch([9, 16, 3, 12]), batch([4, 4, 16, 1])
    for given, counts in ((known, 0), (other, 1), ({n: v.clone() for n, v in known.items()}, 1)):
        with with_known_batch(taken(model, known)):
            ran = observed(lambda given=given: assert_near([model(**given).loss], [reference(**given).loss]))  # type: ignore[misc]
        assert (way(ran), ran["counted_in_the_call"]) == ("packed", counts)


def test_a_view_of_all_texts_and_chunks_of_them_take_their_lengths() -> None:
    reference, model = tiny_bert().bert.eval(), tiny_bert().bert.eval()
    unpad(model, 8)
    rows = batch([5, 3, 6, 2, 2, 4])
    texts = {name: rows[name].view(3, 2, 6) for name in ("input_ids", "attention_mask")}
    known = taken(model, texts)
    ids, mask = (texts[name].flatten(0, 1) for name in ("input_ids", "attention_mask"))
    lengths = known.lengths_of(mask)
    assert {name: values.tolist() for name, values in lengths.items()} == {"_row_lengths": [5, 3, 6, 2, 2, 4]}
    assert known.lengths_of(mask.clone()) == {}
    with torch.no_grad():
        expected = reference(ids, mask).last_hidden_state[mask.bool()]
        with with_known_batch(known):
            ran = observed(
                lambda: assert_near([model(ids, mask).last_hidden_state[mask.bool()]], [expected], what="all texts")
            )
        assert not ran["counted_in_the_call"]
        chunks = zip(ids.split(4), mask.split(4), lengths["_row_lengths"].split(4), strict=True)
        results = []
        for chunk_ids, chunk_mask, chunk in chunks:
            ran = observed(lambda: results.append(model(chunk_ids, chunk_mask, _row_lengths=chunk)))  # noqa: B023
            assert (way(ran), ran["counted_in_the_call"]) == ("packed", 0)
        hidden = torch.cat([result.last_hidden_state for result in results])
    assert_near([hidden[mask.bool()]], [expected], what="chunks")
