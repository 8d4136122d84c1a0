"""Unpadded encoders compared with the untouched model, alone and in a Trainer: masks of every kind, dropout, evidence.

tests/families compares every family, technique, head and kind of input, and lists the models that are refused.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from composer.core import Algorithm, DataSpec, Event, State
from composer.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.models.bert.modeling_bert import BertEncoder

from composer_speedups import CUDAGraphs, TorchCompile, Unpadding, apply
from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.core.compile_counts import compile_counts
from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run
from composer_speedups.packing.call import known_batch
from composer_speedups.packing.encoder import unpadded_encoders, with_counted_rows
from composer_speedups.packing.layout import MULTIPLE, lay_out, packed_tokens
from tests.helpers.common import (
    Batch,
    Batches,
    Recorder,
    batch,
    in_turn,
    make_trainer,
    microbatches,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.exhaustive import family_params, others_exhaustive
from tests.helpers.masks import KINDS, draw_mask, masked_batch, random_masks
from tests.helpers.models import FUSED, HEADS, UNPADDED, Family, Head, tiny_model
from tests.helpers.unpadded import compared, observed, pair, unpad_and_fuse, values, way
from tests.reference.loop import counted, gradients, train_plainly
from tests.reference.tolerance import assert_near

CASES = 14 * len(KINDS)  # for each family and head; holes are seldom packed


def draw_batch(mask: Tensor, model: Any, head: Head, seed: int) -> Batch:
    """Draw tokens, labels, positions in any order, and token types if the model has them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = masked_batch(mask, head, seed=seed)
    inputs["input_ids"] = inputs["input_ids"].masked_fill((mask == 0) & bool(seed % 2), model.config.pad_token_id)
    if seed % 3:
        inputs["position_ids"] = torch.randint(2, 80, mask.shape, generator=generator)
    if hasattr(model.config, "type_vocab_size"):
        inputs["token_type_ids"] = torch.randint(0, 2, mask.shape, generator=generator)
    return inputs


@pytest.mark.parametrize(
    ("family", "head"),
    others_exhaustive(product(UNPADDED, HEADS), [("bert", "classification"), ("modernbert", "mlm")].__contains__),
)
@pytest.mark.pins
def test_every_kind_of_mask_matches_the_untouched_model(family: Family, head: Head) -> None:
    """A thousand generated masks, three of four with row lengths, three of five with fused layers, as the seed says."""
    reference, unpadded = pair(family, head)
    fused = unpad_and_fuse(copy.deepcopy(reference)) if family in FUSED else unpadded
    packed = dict.fromkeys(KINDS, 0)
    for seed in range(CASES):
        kind = KINDS[seed % len(KINDS)]
        inputs = draw_batch(draw_mask(kind, seed), reference, head, seed)
        model = fused if seed % 5 < 3 else unpadded
        given = counted(model, inputs) if seed % 4 else inputs
        results: list[Any] = []
        ran = observed(lambda: results.append(values(model, given)))  # noqa: B023
        assert bool(ran["torch_layer"]) == (model is fused is not unpadded and way(ran) == "packed")
        assert_near(results[0], values(reference, inputs), what=f"{family}, {head}, {kind}, seed {seed}")
        assert ran["counted_in_the_call"] == (seed % 4 == 0)
        packed[kind] += way(ran) == "packed"
    # A classifier's head reads the first slot of each row, so left-padded batches run padded. Holes change the
    # distances between packed tokens that DeBERTa and MPNet use.
    never = {kind for kind, count in packed.items() if count == 0}
    padded = {"left padding"} if head == "classification" else set()
    by_distance = family in ("deberta_v2", "mpnet")
    assert never <= (padded | {"holes"} if by_distance else padded)
    if head == "mlm" and family != "modernbert":
        always = {count for kind, count in packed.items() if not (by_distance and kind == "holes")}
        assert always == {CASES // len(KINDS)}


@pytest.mark.parametrize("given", [None, 512])
@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_are_rounded_coarsely_for_graphs_unless_a_number_is_set(graphs: bool, given: int | None) -> None:
    technique, model = Unpadding(given), tiny_bert()
    others = {"cuda_graphs": CUDAGraphs()} if graphs else {}
    technique.engage(Run(torch.device("cpu"), model=model, techniques={"unpadding": technique, **others}))
    inputs = batch([20] * 9, 64)
    with with_counted_rows(model, inputs, inputs):
        packed = known_batch().rows[0].packed
    assert packed is not None
    assert len(packed) == (given or (256 if graphs else 192))
    assert observed(lambda: model(**inputs))["packed_encoder"] == 1


@pytest.mark.parametrize(
    ("duration", "graphs", "packed"),
    [("400ba", 16, 33024), ("6400ba", 16, 32256), ("1600ep", 16, 32256), ("1000000ba", 16, 30464), ("6400ba", 4, 33024),
     ("6400ba", None, 30016), ("1000000tok", 16, 33024)],
)  # fmt: skip
def test_long_jobs_round_to_smaller_multiples_for_as_many_graphs_as_they_may_have(
    duration: str, graphs: int | None, packed: int
) -> None:
    """16 rows of 1,875 in 4,096 slots: multiples of 5,504, for 6,400 batches of 2,688, and of at least 1,792."""
    others = {} if graphs is None else {"cuda_graphs": CUDAGraphs(max_graphs=graphs)}
    inputs, technique, trainer = batch([1875] * 16, 4096), Unpadding(), make_trainer(max_duration=duration)
    trainer.state.set_dataloader([inputs] * 4, "train")
    techniques = {"unpadding": technique, **others}
    run = Run(torch.device("cpu"), model=tiny_bert(), state=trainer.state, techniques=techniques)
    technique.engage(run)
    technique.fit_start(run)
    trainer.state.batch = dict(inputs)
    technique.after_dataloader(run)
    technique.before_forward(run)
    (rows,) = known_batch().rows
    technique.after_forward(run)
    assert len(rows.packed) == packed
    layout = lay_out(inputs["attention_mask"], packed, None if graphs else MULTIPLE)
    assert layout.cu_seqlens[[16, -1]].tolist() == [30000, packed]


@pytest.mark.parametrize("multiple", [1, 8, 64, 200])
def test_unused_entries_and_padding_have_no_influence(multiple: int) -> None:
    reference, model = pair("bert", "mlm", multiple)
    inputs = masked_batch(random_masks(3)[2], "mlm")
    assert_near(values(model, inputs), values(reference, inputs))
    mask = inputs["attention_mask"]
    assert packed_tokens(int(mask.sum()), mask.shape, multiple) == {1: 23, 8: 24, 64: 64, 200: 64}[multiple], (
        "at most its 34 slots, rounded up to 64"
    )
    hidden = torch.randn(*inputs["input_ids"].shape, 32, requires_grad=True)
    mask, encode = mask.bool(), model.eval().bert
    output = encode(inputs_embeds=hidden, attention_mask=mask).last_hidden_state
    assert_near(output[~mask], torch.zeros_like(output[~mask]))
    noise = torch.where(mask[..., None], hidden, 100.0).detach()
    torch.testing.assert_close(encode(inputs_embeds=noise, attention_mask=mask).last_hidden_state, output)
    (output**2).sum().backward()
    assert not hidden.grad[~mask].any()
    assert hidden.grad[mask].abs().amin(-1).all()


@pytest.mark.parametrize("head", HEADS)
def test_an_all_padding_batch_gives_no_nan(head: Any) -> None:
    _, model = pair("bert", head)
    output = model(**masked_batch(torch.zeros(3, 5, dtype=torch.long), head))
    assert output.logits.isfinite().all()
    output.logits.sum().backward()
    assert all(g.isfinite().all() for g in gradients(model).values())


@pytest.mark.parametrize("given", [dict, counted])
def test_a_batch_without_rows_has_the_untouched_models_result_or_error(given: Any) -> None:
    reference, model = pair()
    inputs = {name: values[:0] for name, values in batch([3, 8]).items()}
    outcomes = []
    for network in (reference, model):
        try:
            own = counted(model, inputs) if given is counted and network is model else inputs
            outcomes.append(str(network(**own).logits.shape))
        except RuntimeError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


# Dropout.


@pytest.mark.parametrize("family", [*family_params(UNPADDED), pytest.param("t5", marks=pytest.mark.exhaustive)])
def test_dropout_masks_are_the_same_without_padding(family: Family) -> None:
    inputs = masked_batch(torch.ones(4, 12, dtype=torch.long), "tokens")
    for change in (unpad, unpad_and_fuse) if family in FUSED else (unpad,):
        reference, model = pair(family, "tokens", apply=change, dropout=0.3, attention_dropout=0.2)
        results = []
        for network in (reference.train(), model.train()):
            torch.manual_seed(5)
            results.append(values(network, inputs))
        assert_near(results[1], results[0])
        assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
        torch.testing.assert_close(model.eval()(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)
        assert observed(lambda: model(**inputs))["torch_layer"] == 2 * (change is unpad_and_fuse)  # noqa: B023


def test_shared_positions_and_masks_for_each_kind_of_layer() -> None:
    reference, model = pair("modernbert", "mlm")
    inputs = masked_batch(draw_mask("right padding", 3), "mlm")
    width = inputs["input_ids"].shape[1]
    shared = {**inputs, "position_ids": torch.arange(width).flip(0)[None]}
    typed = {**inputs, "token_type_ids": inputs["attention_mask"].clone()}  # of BERT's tokenizer; ModernBERT has none
    for given in (shared, typed):
        assert compared(reference, model, lambda module: module(**given).loss) == "packed"  # noqa: B023
    masks = dict.fromkeys(["full_attention", "sliding_attention"], torch.zeros(1, 1, width, width))
    both = {"input_ids": inputs["input_ids"], "attention_mask": masks}
    assert_near([model(**both).logits], [reference(**both).logits])


def split_by_composer(batches: list[Batch]) -> DataSpec:
    return DataSpec(DataLoader(Batches(batches), batch_size=None, sampler=in_turn(batches)))  # type: ignore[arg-type]


@pytest.mark.pins
@pytest.mark.parametrize(("rows", "packed"), [(4, 48), (2, 24 + 32)])
def test_the_evidence_counts_layers_and_tokens_of_all_micro_batches(rows: int, packed: int) -> None:
    technique = Unpadding(8)
    batches = [batch([12, 7, 16, 10]), batch([16, 16, 16, 16])]
    trained(
        [technique], batches=batches, train_dataloader=split_by_composer(batches), device_train_microbatch_size=rows
    )
    evidence = technique.evidence
    assert (evidence["encoders"], evidence["layers"]) == (1, 2)
    assert "scaled_dot_product" in evidence["attention"]
    counts = ("first_batch_slots", "first_batch_tokens", "first_batch_packed")
    assert [evidence[key] for key in counts] == [64, 45, packed]
    assert evidence["padding_of_the_run"] == round(1 - (45 + 64) / 128, 4)
    assert "head_tokens" not in evidence, "the head computes all"


class Sabotage(Algorithm):
    """Undo unpadding after INIT; ``change`` says how."""

    def __init__(self, change: str) -> None:
        self.change = change

    def match(self, event: Event, state: State) -> bool:
        return event == Event.FIT_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model: Any = state.model.model
        if self.change == "class":
            model.bert.encoder.__class__ = BertEncoder
        elif self.change == "outputs":
            model.config.output_hidden_states = True
        else:
            model.bert.encoder.layer[1].forward = lambda hidden, *_, **__: hidden


@pytest.mark.parametrize(
    ("change", "rows", "reason"),
    [
        ("class", 4, "the first forward pass ran without its encoder"),
        ("outputs", 4, "the first forward pass ran padded"),
        ("layer", 4, "1 of 2 calls of layers ran on packed tokens"),
        ("layer", 2, "2 of 4 calls of layers ran on packed tokens"),
    ],
)
def test_a_restored_encoder_is_detected(change: str, rows: int, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        trained([Unpadding(check="never"), Sabotage(change)], **microbatches(plain_batches(), rows))


def test_masks_that_nobody_could_count_are_not_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unpadding, "_count", lambda *_: {})  # as of masks on a GPU
    technique = Unpadding()
    trained([technique], batches=[batch([3, 16])])
    assert technique.evidence["masks_counted_on_the_device"] == 1
    assert "padding_of_the_run" not in technique.evidence


def test_without_a_mask_nothing_is_left_out_and_the_evidence_says_so() -> None:
    technique, inputs = Unpadding(), {name: x for name, x in batch([16, 16]).items() if name != "attention_mask"}
    ours, plain = (trained(algorithms, batches=[inputs]) for algorithms in ([technique], []))
    assert_near(*(dict(trainer.state.model.named_parameters()) for trainer in (ours, plain)))
    assert (
        technique.evidence["padding_of_the_run"]
        == "unknown: the batches have no attention_mask, so every slot is a token"
    )


def test_left_padding_and_holes_stop_a_run_whose_head_or_distances_they_change() -> None:
    left = masked_batch(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), "classification")
    holes = masked_batch(torch.tensor([[1] * 12, [1] * 3 + [0] * 5 + [1] * 4]), "mlm")
    for model, inputs in ((tiny_bert(), left), (tiny_model("modernbert", "mlm"), holes)):
        with pytest.raises(Refusal, match=r"rows begin with padding.*pad on the right, without holes"):
            trained([Unpadding()], model=model, batches=[inputs])
    technique = Unpadding()
    inputs = masked_batch(left["attention_mask"], "mlm")
    trained([technique], model=tiny_model("bert", "mlm"), batches=[inputs])
    assert technique.engaged
    later = Unpadding()
    trained([later], batches=[batch([3, 4]), left])  # a later batch may run padded
    assert later.engaged
    assert later.evidence["micro_batches_kept_padded"] == 1
    assert later.evidence["padding_of_the_run"] == round(1 - (7 + 6) / 16, 4)


class Shorten(Algorithm):
    """An algorithm that changes batches after they were loaded."""

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.batch["attention_mask"][:, 5:] = 0


def test_tokens_are_counted_after_the_last_change_to_the_batch() -> None:
    batches = plain_batches(2)
    expected = copy.deepcopy(batches)
    for changed in expected:
        changed["attention_mask"][:, 5:] = 0
    recorder = Recorder()
    trained([Unpadding(8), Shorten()], batches=batches, callbacks=[recorder])
    assert_near(recorder.losses, train_plainly(tiny_bert(), expected).losses)


def counted_rows(model: nn.Module, inputs: Batch) -> list[int | None]:
    """The number of packed tokens of each mask that is known in a loop without Composer."""
    with with_counted_rows(model, inputs, inputs):
        return [None if rows.packed is None else len(rows.packed) for rows in known_batch().rows]


def test_rows_are_counted_without_a_walk_over_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = nn.Sequential(tiny_bert(), tiny_model("bert", "mlm")), batch([3, 5, 8])
    applied = apply(model, [Unpadding(8)])
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", lambda *_, **__: pytest.fail("walks over the modules"))
        assert counted_rows(model, inputs) == [16]
        unpadded = copy.deepcopy(model)
    applied.undo()
    assert counted_rows(model, inputs) == []
    assert not vars(model).keys() & {"changed_modules"}
    assert {id(module) for module in unpadded.changed_modules} <= {id(module) for module in unpadded.modules()}
    unpad(unpadded[0], 32)
    assert counted_rows(unpadded, inputs) == [32], "by the present settings"
    restore_encoders(unpadded[0])
    assert unpadded_encoders(unpadded) == [unpadded[1].bert.encoder], "a part was restored by itself"
    assert counted_rows(unpadded, inputs) == [16]
    restore_encoders(unpadded)
    assert counted_rows(unpadded[1], inputs) == counted_rows(unpadded, inputs) == []


# With gradient checkpointing and torch.compile.


@pytest.mark.parametrize("scope", others_exhaustive(["model", "blocks"], "blocks".__eq__))
def test_after_the_first_batches_nothing_is_recompiled(scope: Any) -> None:
    """Five more batches have other numbers of tokens, rows and slots."""
    reference, model = tiny_bert(), tiny_bert()
    for network in (reference, model):
        network.config.problem_type = "single_label_classification"
    apply(model, [Unpadding(8), TorchCompile(scope=scope, backend="eager")])
    lengths = torch.randint(1, 25, (8, 9), generator=torch.Generator().manual_seed(2)).tolist()
    batches = [batch(rows[: 3 + i % 7], seed=i) for i, rows in enumerate(lengths)]
    assert len({int(inputs["attention_mask"].sum()) // 8 for inputs in batches[3:]}) >= 4
    warm = compile_counts()
    for i, inputs in enumerate(batches):
        if i == 3:
            warm = compile_counts()
        with with_counted_rows(model, inputs, inputs):
            actual = values(model, inputs)
        assert_near(actual, values(reference, inputs), what=f"batch {i}")
    assert warm.graphs
    assert compile_counts().since(warm)[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize("counted", [True, False])
def test_other_numbers_of_packed_tokens_are_not_compiled_again(counted: bool) -> None:
    """Counting in the call breaks the graph."""
    model = tiny_model("bert", layers=1)
    model.config.problem_type = "single_label_classification"
    apply(model, [Unpadding(8), TorchCompile(scope="model", backend="eager")])
    before = compile_counts()
    first: Any = None
    for lengths in ([24, 3], [24, 20], [24, 11]):
        inputs = batch(lengths)
        with with_counted_rows(model, inputs, inputs) if counted else nullcontext():
            model(**inputs)
        first = first or compile_counts()
    assert compile_counts().since(first)[:3] == (0, 0, 0), "graphs, breaks, recompiles"
    assert (first.since(before)[:3] == (1, 0, 0)) is counted


class Towers(nn.Module):
    """Two encoders of different depth, one of which is called more often."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = tiny_model("bert", layers=1), tiny_model("bert", layers=3)

    def forward(self, **inputs: Any) -> Tensor:
        return sum(self.short(**inputs).loss for _ in range(3)) + self.long(**inputs).loss  # type: ignore[no-any-return]


def test_towers_may_be_called_differently_often() -> None:
    towers = Towers()
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.1)
    applied = apply(towers, [Unpadding(8)], optimizer)
    towers(**batch([3, 5, 8])).backward()
    optimizer.step()
    assert applied.evidence["unpadding"]["layers"] == 4
