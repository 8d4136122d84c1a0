"""Frozen layers: training equals that with requires_grad=False at the same step, also on ranks and after resuming."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from transformers import BertModel

from composer_speedups import (
    BnbOptimizer,
    CUDAGraphs,
    FusedLayers,
    LayerFreezing,
    ShardedOptimizer,
    Unpadding,
    apply_layer_freezing,
    apply_torch_compile,
    gradient_norms_of_blocks,
    settled_blocks,
)
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.optimizer_state import state_bytes
from composer_speedups.core.registry import technique_class
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import refuse_conflicts, screen
from composer_speedups.core.trainer_state import model_of
from composer_speedups.distributed.ddp import OverlappedDDP, ddp_of, sums_of
from composer_speedups.train.checkpoints.reading import restricted_loading
from tests.algorithms.test_cuda_graphs_segments import LAYERS, bert
from tests.helpers.common import (
    SAVING,
    assert_not_engaged,
    batch,
    final_weights,
    fit_and_close,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.models import tiny_model
from tests.helpers.ranks import on_ranks
from tests.helpers.rerun import graphed
from tests.helpers.settings import ENTRIES
from tests.reference.composition import batches
from tests.reference.loop import EPS, gradients
from tests.reference.tolerance import assert_near

FIRST = {0: ("bert.embeddings.",), 1: ("bert.embeddings.", "bert.encoder.layer.0.")}  # blocks → names of parameters
FIRST[2] = (*FIRST[1], "bert.encoder.layer.1.")


def exact(actual: Any, expected: Any) -> None:
    assert len(expected) > 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def freeze_by_hand(model: Any, blocks: int) -> None:
    """What the technique should be equal to, for BERT."""
    for name, parameter in model.named_parameters():
        if name.startswith(FIRST[blocks]):
            parameter.requires_grad, parameter.grad = False, None


class ByHand(Callback):
    """Freezes layers after some batches, without the technique."""

    def __init__(self, blocks: int, after: int) -> None:
        self.blocks, self.after = blocks, after

    def fit_start(self, state: State, logger: Logger) -> None:
        self.batch_end(state, logger)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value >= self.after:
            freeze_by_hand(model_of(state).model, self.blocks)


def frozen_names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


# Training


def train_by_hand(blocks: int, after: int, inputs: list[Any]) -> dict[str, Tensor]:
    """A loop in plain PyTorch, with weight decay."""
    model = tiny_bert().train()
    optimizer = AdamW(model.parameters(), lr=1e-3, eps=EPS, weight_decay=0.01, foreach=False, fused=False)
    for step, one in enumerate(inputs):
        if step == after:
            freeze_by_hand(model, blocks)
        optimizer.zero_grad()
        model(**one).loss.backward()
        optimizer.step()
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("layers", "start", "after"),
    others_exhaustive(
        [(1, "2ba", 2), ("embeddings", "0ba", 0), (2, "0.5dur", 3), (1, "1ep", 3), (2, "0ba", 0)],
        lambda case: case[1] == "2ba",
    ),
)
def test_weights_equal_those_of_a_plain_loop_that_freezes_at_the_same_step(layers: Any, start: str, after: int) -> None:
    inputs, technique = plain_batches(3), LayerFreezing(layers=layers, start=start)
    trainer = trained([technique], batches=inputs, max_duration="2ep")
    blocks = 0 if layers == "embeddings" else layers
    expected = train_by_hand(blocks, after, [*inputs, *inputs])
    assert_near(final_weights(trainer), expected, what="weights")
    first = tiny_bert().state_dict()
    moved = {n for n, w in expected.items() if n.startswith("model.bert.emb") and (w != first[n[6:]]).any()}
    assert bool(moved) is (after > 0), "frozen weights neither move nor decay"
    assert technique.evidence["froze_after_batches"] == {technique.evidence["frozen"]: after}
    names = {name for name in expected if name.removeprefix("model.").startswith(FIRST[blocks])}
    assert frozen_names(trainer.state.model) == names
    frozen = sum(w.numel() for name, w in expected.items() if name in names)
    assert technique.evidence["frozen_parameters"] == frozen
    assert technique.evidence["trained_parameters"] == sum(w.numel() for w in expected.values()) - frozen


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_draws_the_same_numbers(packed: bool) -> None:
    runs = []
    for technique, callbacks in (([], [ByHand(1, 2)]), ([LayerFreezing(layers=1, start="2ba")], [])):
        algorithms: list[Any] = [*technique, *([Unpadding(), FusedLayers()] if packed else [])]
        model = tiny_bert(dropout=0.3)
        runs.append(final_weights(trained(algorithms, model=model, callbacks=callbacks, batches=plain_batches(5))))
    exact(*runs)


OPTIMIZERS = [name for name in ENTRIES if name.endswith("_optimizer") or name == "adafactor"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if ENTRIES[name].variants])
def test_every_optimizer_skips_frozen_parameters_frees_their_state_and_resumes(name: str, tmp_path: Path) -> None:
    def algorithms() -> list[Any]:
        return [LayerFreezing(layers=1, start="2ba"), technique_class(name)(**ENTRIES[name].variants[0])]

    settings: dict[str, Any] = {"save_folder": str(tmp_path), **SAVING, "save_interval": "1ba"}
    trainer = trained(algorithms(), batches=plain_batches(5), **settings)
    by_hand = trained([algorithms()[1]], batches=plain_batches(5), callbacks=[ByHand(1, 2)])
    exact(final_weights(trainer), final_weights(by_hand))
    (optimizer,), (other,) = trainer.state.optimizers, by_hand.state.optimizers
    named = dict(trainer.state.model.named_parameters())
    stepped = {n for n, p in named.items() if optimizer.state.get(p)}
    assert stepped == {n for n, p in named.items() if p.requires_grad}
    technique: Any = trainer.state.algorithms[0]
    assert technique.evidence["optimizer_bytes"] == state_bytes(optimizer)
    assert technique.evidence["optimizer_bytes_freed"] == state_bytes(other) - state_bytes(optimizer) > 0
    for resume in ("ba1.pt", "ba2.pt", "ba4.pt"):
        with restricted_loading(trust=False):
            resumed = trained(algorithms(), batches=plain_batches(5), load_path=str(tmp_path / resume))
        exact(final_weights(resumed), final_weights(trainer))


@pytest.mark.exhaustive
def test_the_state_of_frozen_parameters_is_freed_also_on_the_host() -> None:
    optimizer_technique = technique_class("offloaded_optimizer")(allow_cpu=True)  # type: ignore[call-arg]
    trainer = trained([LayerFreezing(layers=1, start="2ba"), optimizer_technique])
    optimizer: Any = trainer.state.optimizers[0]
    assert set(optimizer._buffers) == {p for p in trainer.state.model.parameters() if p.requires_grad}


def stored_by(model: Any, inputs: Any) -> int:
    """Number of values that a forward pass stores for the backward pass."""
    kept: list[int] = []

    def store(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        model(**inputs)
    return sum(kept)


@pytest.mark.exhaustive
def test_no_activations_of_frozen_layers_are_stored() -> None:
    model, inputs = bert().train(), batch([12, 7])
    stored = []
    for layers in (None, "embeddings", 1, 3, LAYERS):
        if layers is not None:
            apply_layer_freezing(model, layers=layers)
        stored.append(stored_by(model, inputs))
    whole, embedded, one, three, none = stored
    block = (embedded - none) // LAYERS
    assert whole > embedded > one
    assert abs(one - three - 2 * block) < block / 4, "each block stores as much as the others"
    assert none < block


@pytest.mark.exhaustive
def test_a_later_call_freezes_more_and_an_optimizer_that_exists_loses_the_state() -> None:
    model = bert()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model(**batch([4, 4])).loss.backward()
    optimizer.step()
    before = state_bytes(optimizer)
    assert apply_layer_freezing(model, optimizer) == ["bert.embeddings"]
    assert apply_layer_freezing(model, [optimizer], 2) == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert apply_layer_freezing(model, optimizer, 2) == []
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert all(p.grad is None and p not in optimizer.state for p in frozen)
    scalars = len([*model.parameters()])
    assert state_bytes(optimizer) == before - sum(2 * p.nbytes + 4 for p in frozen)
    assert len(optimizer.param_groups[0]["params"]) == scalars, "groups do not change"


@pytest.mark.exhaustive
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_compiled_code_is_compiled_again(scope: Any) -> None:
    torch.compiler.reset()
    model, reference, inputs = bert(), bert(), batch([12, 7])
    apply_torch_compile(model, scope=scope, backend="aot_eager")
    for layers in ("embeddings", 2, 4):
        for each in (model, reference):
            each.zero_grad()
            each(**inputs).loss.backward()
        assert_near(gradients(model), gradients(reference), what=f"before {layers}")
        for each in (model, reference):
            apply_layer_freezing(each, layers=layers)
    torch.compiler.reset()


# CUDA graphs, with a stand-in for the capture


@pytest.mark.parametrize(
    ("segments", "accumulate"), others_exhaustive([(1, True), (1, False), (3, False)], lambda case: case[1])
)
def test_graphs_are_captured_again_at_each_change(segments: int, accumulate: bool) -> None:
    reference, model = bert(), bert()
    calls = graphed(model, segments=segments, accumulate=accumulate)
    for layers in (None, "embeddings", 2, LAYERS):
        for each in (model, reference):
            if layers is not None:
                apply_layer_freezing(each, layers=layers)
            each.zero_grad()
        graphs = [*calls._graphs.values()]
        for seed in range(2):
            for each in (model, reference):
                each(**batch([5, 4], seed=seed)).loss.backward()
        assert_near(gradients(model), gradients(reference), what=f"{layers}")
        (graph,) = calls._graphs.values()
        assert graph not in graphs
    assert (calls.replays, calls.eager_calls) == (8, 0)


@pytest.mark.exhaustive
def test_the_backward_pass_is_not_cut_in_frozen_blocks() -> None:
    model = bert()
    calls = graphed(model, segments=LAYERS)
    apply_layer_freezing(model, layers=3)
    model(**batch([5, 4])).loss.backward()
    assert calls.backward_segments == LAYERS - 3


# auto


def test_blocks_in_front_of_the_first_that_changes_much_have_settled() -> None:
    before = [10.0, 10.0, 10.0, 10.0]
    assert settled_blocks(before, [9.9, 10.2, 5.0, 10.0]) == 1  # the rates' median is 0.015
    assert settled_blocks(before, [9.9, 10.2, 5.0, 10.0], percentile=75) == 2
    assert settled_blocks(before, [10.1, 10.2, 10.5, 1.0], percentile=100) == 3, "all in front of the largest rate"
    assert settled_blocks(before, [5.0, 10.1, 10.1, 10.1]) == 0, "only blocks from the first on"
    assert settled_blocks(before, [10.0, 10.0, 9.9, 5.0], frozen=2) == 3, "compared with blocks that train"
    assert settled_blocks(before, [1.0, 1.0, 1.0, 9.0], frozen=3) == 3, "the last block never is"
    assert settled_blocks(before, before) == 0, "equal rates say nothing"
    assert settled_blocks([0.0, 1.0], [0.0, 1.0]) == 0, "a block without a gradient has no rate"
    with pytest.raises(ValueError, match=r"^norms of 1 and of 2 blocks cannot be compared$"):
        settled_blocks([1.0], [1.0, 2.0])


@pytest.mark.exhaustive
def test_gradient_norms_are_those_of_whole_blocks() -> None:
    model = bert()
    model(**batch([12, 7])).loss.backward()
    expected = [torch.cat([p.grad.flatten() for p in block.parameters()]).norm() for block in model.bert.encoder.layer]
    assert_near(list(gradient_norms_of_blocks(model)), expected)
    next(model.bert.encoder.layer[2].parameters()).grad[0] = torch.inf
    exact(gradient_norms_of_blocks(model), torch.zeros(LAYERS))


class Norms(Callback):
    """Record the gradient norms of the blocks of every batch, before layers are frozen."""

    def __init__(self) -> None:
        self.norms: list[list[float]] = []

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.norms.append(gradient_norms_of_blocks(state.model).tolist())


AUTO: dict[str, Any] = {"layers": "auto", "start": "1ba", "interval": "2ba", "percentile": 80}


def decided(norms: list[list[float]]) -> dict[str, int]:
    """What AUTO should decide: number of blocks → trained batches."""
    changes: dict[str, int] = {}
    frozen = 0
    for end in range(5, len(norms) + 1, 2):
        means = [torch.tensor(norms[e - 2 : e]).mean(0).tolist() for e in (end - 2, end)]
        blocks = settled_blocks(means[0], means[1], frozen, 80)
        if blocks > frozen:
            changes[f"embeddings and {blocks} block{'s' if blocks > 1 else ''}"], frozen = end, blocks
    return changes


@pytest.mark.exhaustive
def test_auto_compares_the_mean_norms_of_intervals_and_resumes_exactly(tmp_path: Path) -> None:
    inputs, norms, technique = plain_batches(13), Norms(), LayerFreezing(**AUTO)
    saving = {**SAVING, "save_interval": "1ba", "save_folder": str(tmp_path)}
    trainer = trained([technique], model=bert(), batches=inputs, callbacks=[norms], **saving)
    changes = decided(norms.norms)
    assert len(changes) > 1, "more than one change is tested"
    assert technique.evidence["froze_after_batches"] == changes
    assert technique.evidence["comparisons"] == 5
    after = [*changes.values()]
    for resume in {1, 4, after[0] - 1, after[0], after[-1] - 1}:
        resumed = LayerFreezing(**AUTO)
        with restricted_loading(trust=False):
            other = trained([resumed], model=bert(), batches=inputs, load_path=str(tmp_path / f"ba{resume}.pt"))
        exact(final_weights(other), final_weights(trainer))
        assert resumed.evidence["froze_after_batches"] == changes
        assert resumed.evidence["comparisons"] == 5


@pytest.mark.exhaustive
def test_auto_needs_two_intervals_and_says_when_nothing_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([LayerFreezing("auto", interval="0.6dur")])
    assert_not_engaged(trainer, "before two intervals of 0.6dur were over")
    monkeypatch.setattr("composer_speedups.algorithms.layer_freezing.layer_freezing.settled_blocks", lambda *_: 0)
    technique = LayerFreezing("auto", interval="0.25dur")
    trained([technique])
    assert technique.evidence["frozen"] == "nothing"
    assert technique.evidence["comparisons"] == 3
    assert "settled" in technique.evidence["note"]


def test_auto_continues_in_a_longer_fit() -> None:
    technique = LayerFreezing("auto", interval="0.25dur")
    trainer = make_trainer([technique], model=bert(), batches=plain_batches(8))
    trainer.fit()
    assert technique.evidence["comparisons"] == 3  # of intervals of 2 batches
    trainer.fit(duration="8ba")  # intervals are of 4 batches now
    trainer.close()
    assert technique.evidence["comparisons"] == 5


def test_a_later_fit_that_freezes_no_longer_says_that_nothing_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    technique, settled = LayerFreezing("auto", interval="2ba"), [0, 0, 1, 1]
    function = "composer_speedups.algorithms.layer_freezing.layer_freezing.settled_blocks"
    monkeypatch.setattr(function, lambda *_: settled.pop(0))
    trainer = make_trainer([technique], batches=plain_batches(6))
    trainer.fit()
    assert (technique.evidence["frozen"], "note" in technique.evidence) == ("nothing", True)
    trainer.fit(duration="4ba")
    trainer.close()
    assert (technique.evidence["frozen"], "note" in technique.evidence) == ("embeddings and 1 block", False)


# Ranks


def rank_weights(kind: str, *, overlapped: bool = False, load: Path | None = None, save: Path | None = None) -> Any:
    """Train four batches on each rank, with one kind of freezing."""
    blocks, after = (1, 2) if "later" in kind else (1, 0)
    technique = LayerFreezing(layers=blocks, start=f"{after}ba") if "auto" not in kind else LayerFreezing(**AUTO_RANKS)
    algorithms: list[Any] = [technique]
    if "clipped" in kind:
        algorithms.append(GradientClipping("norm", clipping_threshold=0.5))
    if "sharded" in kind:
        algorithms.append(ShardedOptimizer())
    settings: dict[str, Any] = {**SAVING, "save_folder": str(save)} if save else {}
    settings |= {"load_path": str(load / "ba2.pt")} if load else {}
    callbacks = [OverlappedDDP()] if overlapped else []
    trainer = make_trainer(
        algorithms,
        model=bert() if kind == "auto" else tiny_bert(),
        batches=batches(dist.get_world_size()),
        callbacks=callbacks,
        max_duration="4ba",
        **settings,
    )
    fit_and_close(trainer)
    sums = sums_of(trainer.state.model)
    return {
        "weights": {name: p.detach().clone() for name, p in model_of(trainer.state).named_parameters()},
        "evidence": technique.evidence,
        "sums": sums.summary() if sums else None,
    }


AUTO_RANKS: dict[str, Any] = {"layers": "auto", "interval": "1ba", "percentile": 100}
KINDS = ("from the start", "later", "later, clipped", "auto", "later, sharded")


def all_ranks(folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind in KINDS:
        for overlapped in (False, True):
            found[kind, overlapped] = rank_weights(kind, overlapped=overlapped)
    found["saved"] = rank_weights("later", save=folder / str(dist.get_world_size()))
    found["resumed"] = rank_weights("later", load=folder / str(dist.get_world_size()))
    return found


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The current world size:UserWarning")
def test_two_ranks_train_like_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks, alone = on_ranks(partial(all_ranks, tmp_path)), all_ranks(tmp_path)
    plain = rank_weights("later")["weights"]
    for (kind, overlapped), expected in [(key, value) for key, value in alone.items() if isinstance(key, tuple)]:
        for rank in ranks:
            seen = rank[kind, overlapped]
            exact(seen["weights"], ranks[0][kind, False]["weights"])
            assert_near(seen["weights"], expected["weights"], what=f"{kind}, overlapped: {overlapped}")
            assert seen["evidence"]["froze_after_batches"] == expected["evidence"]["froze_after_batches"]
            if overlapped:
                assert seen["sums"]["mib_a_step"] * 2**20 == 4 * seen["evidence"]["trained_parameters"], "reduced bytes"
                assert (seen["sums"]["overlapped_steps"] > 0) is (kind not in ("later, clipped", "later, sharded"))
    for rank in ranks:
        exact(rank["resumed"]["weights"], rank["saved"]["weights"])
    assert any((w != plain[n]).any() for n, w in alone["from the start", False]["weights"].items())


def loop_on_ddp(wrap: Any, hook: bool, freeze: Any) -> dict[str, Any]:
    """Two steps, a change, and three more; gradients stay equal to those of all ranks' rows in one process."""
    model, reference, rank = bert(), bert(), dist.get_global_rank()
    shared = wrap(model)
    if hook:
        shared.register_comm_hook(None, allreduce_hook)
    for step, layers in enumerate([None, None, "embeddings", None, 2, None, None]):
        if layers is not None:
            freeze(shared, layers)
            apply_layer_freezing(reference, layers=layers)
        shared.zero_grad()
        reference.zero_grad()
        for other in range(2):
            (reference(**batch([5, 4], seed=10 * step + other)).loss / 2).backward()
        shared(**batch([5, 4], seed=10 * step + rank)).loss.backward()
        assert_near(gradients(model), gradients(reference), what=f"step {step}")
    return {name: p.grad is None for name, p in model.named_parameters()}


def loops() -> Any:
    freeze = lambda model, layers: apply_layer_freezing(model, layers=layers)  # noqa: E731
    without = [loop_on_ddp(wrap, hook, freeze) for wrap, hook in LOOPS]
    shared = DistributedDataParallel(bert())
    apply_layer_freezing(shared.module)
    shared(**batch([5, 4])).loss.backward()
    try:
        shared(**batch([5, 4]))
    except RuntimeError as error:
        return without, str(error)
    return without, ""


LOOPS: list[Any] = [
    (ddp_of, False),
    (DistributedDataParallel, False),
    (partial(DistributedDataParallel, gradient_as_bucket_view=True), True),
]


@pytest.mark.exhaustive
def test_a_loop_under_ddp_reduces_only_the_gradients_that_are_left() -> None:
    for without, error in on_ranks(loops):
        assert all(sum(one.values()) == 5 + 2 * 16 for one in without)
        assert "Expected to have finished reduction" in error, "DDP refuses to go on if only its module was given"


# Evidence, refusals and conflicts


class Does(Callback):
    """Calls a function with the model after a batch."""

    def __init__(self, function: Any, after: int = 1) -> None:
        self.function, self.after = function, after

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.after:
            self.function(state.model.model)


def thaw(model: Any) -> None:
    model.bert.encoder.layer[0].output.dense.bias.requires_grad = True


@torch.no_grad()
def change(model: Any) -> None:
    model.bert.embeddings.LayerNorm.weight[3] += 1e-3


TRAINS = "layer.0.output.dense.bias requires gradients or has one, although it is frozen"
CHANGED = "embeddings.LayerNorm.weight changed, although it is frozen"


@pytest.mark.parametrize(
    ("start", "function", "message"),
    others_exhaustive(
        [("0ba", thaw, TRAINS), ("2ba", thaw, TRAINS), ("0ba", change, CHANGED), ("2ba", change, CHANGED)],
        lambda case: case[0] == "2ba",
    ),
)
def test_a_frozen_weight_that_trains_or_changes_is_detected(start: str, function: Any, message: str) -> None:
    after = 4 if start == "2ba" else 3  # after the last of four batches, there is no gradient yet
    trainer = make_trainer([LayerFreezing(layers=1, start=start)], callbacks=[Does(function, after)])
    assert_not_engaged(trainer, message)


@pytest.mark.exhaustive
def test_a_backward_pass_of_frozen_layers_is_detected() -> None:
    model = tiny_bert()
    model.enable_input_require_grads()
    assert_not_engaged(make_trainer([LayerFreezing()], model=model), "the embeddings' output requires gradients")


@pytest.mark.exhaustive
def test_a_start_after_the_end_is_detected() -> None:
    assert_not_engaged(make_trainer([LayerFreezing(start="5ba")]), "training ended before start=5ba")


class Stops(Callback):
    """Stops training after the second batch, as early stopping may."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == 2:
            state.stop_training()


@pytest.mark.parametrize(
    ("technique", "before"),
    [(LayerFreezing(start="3ba"), "start=3ba"), (LayerFreezing("auto", interval="2ba"), "two intervals of 2ba")],
)
def test_a_run_that_is_stopped_before_the_start_is_not_lost(technique: LayerFreezing, before: str) -> None:
    trained([technique], callbacks=[Stops()])
    assert technique.evidence["frozen"] == "nothing"
    assert technique.evidence["note"].startswith(f"training was stopped before {before}")


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (tiny_bert, 3, r"the model has 2 blocks, not 3"),
        (tiny_bert, 0, r"layers must be 'embeddings' or a number of blocks of at least 1, not 0"),
        (tiny_bert, "auto", r"layers must be 'embeddings' or a number of blocks of at least 1, not 'auto'"),
        (lambda: nn.Linear(2, 2), 1, r"the model has 0 encoders; a model with one encoder of these families is supp"),
        (lambda: nn.ModuleList([tiny_bert(), tiny_bert()]), 1, r"the model has 2 encoders; a model with one encoder"),
        (lambda: BertModel(tiny_bert().config, add_pooling_layer=False), 2, r"layers=2 leaves no parameter to train"),
        (lambda: tiny_bert().bert.encoder, 1, r"the model has 0 modules of class BertEmbeddings, instead of one"),
        (lambda: tiny_model("bert", "mlm"), "embeddings", r"\S+decoder.weight is tied to the embeddings and would be"),
    ],
)
def test_models_and_numbers_that_cannot_be_frozen_are_refused(model: Any, layers: Any, message: str) -> None:
    built = model()
    with pytest.raises(ValueError, match=f"^{message}") as error:
        apply_layer_freezing(built, layers=layers)
    assert "\n" not in str(error.value)
    assert not frozen_names(built)


@pytest.mark.exhaustive
def test_an_untied_masked_language_model_trains() -> None:
    tied = tiny_model("bert", "mlm")
    config = copy.deepcopy(tied.config)
    config.tie_word_embeddings = False
    model = type(tied)(config)
    assert apply_layer_freezing(model) == ["bert.embeddings"]
    assert all("decoder" not in name for name in frozen_names(model))


@pytest.mark.exhaustive
def test_albert_freezes_its_embeddings_only() -> None:
    model = tiny_model("albert")
    assert apply_layer_freezing(model) == ["albert.embeddings"]
    with pytest.raises(ValueError, match="run several times each"):
        apply_layer_freezing(model, layers=1)


def test_a_trainer_refuses_in_one_line() -> None:
    with pytest.raises(TechniqueError, match=r"^layer_freezing: the model has 2 blocks, not 7; remove it for this mod"):
        make_trainer([LayerFreezing(layers=7, start="1ba")])
    with pytest.raises(TechniqueError, match=r"^layer_freezing: layers=auto compares gradients, .* this run is fp16"):
        screen([LayerFreezing(layers="auto")], Context(torch.device("cpu"), "amp_fp16"))
    stable = [LayerFreezing(), BnbOptimizer(stable_embedding=True)]
    with pytest.raises(TechniqueError, match=r"a stable embedding .* must be trained"):
        refuse_conflicts(stable)
    refuse_conflicts([LayerFreezing(), BnbOptimizer(), CUDAGraphs()])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"layers": 1, "interval": "1ba"}, "interval is only for layers=auto, not 1"),
        ({"percentile": 10.0}, "percentile is only for layers=auto, not embeddings"),
        ({"start": "soon"}, "start must be a Composer time"),
        ({"layers": "auto", "interval": "0ba"}, "interval must be above 0"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerFreezing(**settings)
