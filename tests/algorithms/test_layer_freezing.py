"""Frozen layers: training equals that with requires_grad=False, also on ranks and after resuming."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from composer.algorithms import GradientClipping
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from composer_speedups import (
    FusedLayers,
    LayerFreezing,
    ShardedOptimizer,
    Unpadding,
    apply,
)
from composer_speedups.algorithms.layer_freezing.modules import freeze
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import technique_class
from composer_speedups.core.trainer_state import model_of
from composer_speedups.distributed.ddp import OverlappedDDP, sums_of
from composer_speedups.train.checkpoints import restricted_loading
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
from tests.reference.tolerance import assert_equal, assert_near

FIRST = {0: ("bert.embeddings.",), 1: ("bert.embeddings.", "bert.encoder.layer.0.")}  # blocks → names of parameters
FIRST[2] = (*FIRST[1], "bert.encoder.layer.1.")


def freeze_by_hand(model: Any, blocks: int) -> None:
    """What the technique should be equal to, for BERT."""
    for name, parameter in model.named_parameters():
        if name.startswith(FIRST[blocks]):
            parameter.requires_grad, parameter.grad = False, None


def frozen_names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


# Training


def train_by_hand(blocks: int, inputs: list[Any]) -> dict[str, Tensor]:
    """A loop in plain PyTorch, with weight decay."""
    model = tiny_bert().train()
    freeze_by_hand(model, blocks)
    optimizer = AdamW(model.parameters(), lr=1e-3, eps=EPS, weight_decay=0.01, foreach=False, fused=False)
    for one in inputs:
        optimizer.zero_grad()
        model(**one).loss.backward()
        optimizer.step()
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layers", ["embeddings", 1, 2])
def test_weights_equal_those_of_a_plain_loop_that_freezes(layers: Any) -> None:
    inputs, technique = plain_batches(3), LayerFreezing(layers=layers)
    trainer = trained([technique], batches=inputs)
    blocks = 0 if layers == "embeddings" else layers
    expected = train_by_hand(blocks, inputs)
    assert_near(final_weights(trainer), expected, what="weights")
    names = {name for name in expected if name.removeprefix("model.").startswith(FIRST[blocks])}
    assert frozen_names(trainer.state.model) == names
    frozen = sum(w.numel() for name, w in expected.items() if name in names)
    described = {0: "embeddings", 1: "embeddings and 1 block", 2: "embeddings and 2 blocks"}
    assert technique.evidence["frozen"] == described[blocks]
    assert technique.evidence["frozen_parameters"] == frozen
    assert technique.evidence["trained_parameters"] == sum(w.numel() for w in expected.values()) - frozen


def by_hand(blocks: int) -> Any:
    model = tiny_bert(dropout=0.3)
    freeze_by_hand(model, blocks)
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_draws_the_same_numbers(packed: bool) -> None:
    runs = []
    for technique, model in (([], by_hand(1)), ([LayerFreezing(layers=1)], tiny_bert(dropout=0.3))):
        algorithms: list[Any] = [*technique, *([Unpadding(), FusedLayers()] if packed else [])]
        runs.append(final_weights(trained(algorithms, model=model, batches=plain_batches(5))))
    assert_equal(*runs)


OPTIMIZERS = [name for name in ENTRIES if name.endswith("_optimizer") or name == "adafactor"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if ENTRIES[name].variants])
def test_every_optimizer_skips_frozen_parameters_and_resumes(name: str, tmp_path: Path) -> None:
    def algorithms() -> list[Any]:
        return [LayerFreezing(layers=1), technique_class(name)(**ENTRIES[name].variants[0])]

    settings: dict[str, Any] = {"save_folder": str(tmp_path), **SAVING, "save_interval": "1ba"}
    trainer = trained(algorithms(), batches=plain_batches(5), **settings)
    frozen = tiny_bert()
    freeze_by_hand(frozen, 1)
    assert_equal(
        final_weights(trainer), final_weights(trained([algorithms()[1]], model=frozen, batches=plain_batches(5)))
    )
    (optimizer,) = trainer.state.optimizers
    named = dict(trainer.state.model.named_parameters())
    stepped = {n for n, p in named.items() if optimizer.state.get(p)}
    assert stepped == {n for n, p in named.items() if p.requires_grad}
    with restricted_loading(trust=False):
        resumed = trained(algorithms(), batches=plain_batches(5), load_path=str(tmp_path / "ba4.pt"))
    assert_equal(final_weights(resumed), final_weights(trainer))


# CUDA graphs, with a stand-in for the capture


@pytest.mark.parametrize(
    ("segments", "accumulate"), others_exhaustive([(1, True), (1, False), (3, False)], lambda case: case[1])
)
def test_graphs_are_captured_again_at_each_change(segments: int, accumulate: bool) -> None:
    reference, model = bert(), bert()
    calls = graphed(model, segments=segments, accumulate=accumulate)
    for layers in (None, 0, 2, LAYERS):
        for each in (model, reference):
            if layers is not None:
                freeze(each, (), layers)
            each.zero_grad()
        graphs = [*calls._graphs.values()]
        for seed in range(2):
            for each in (model, reference):
                each(**batch([5, 4], seed=seed)).loss.backward()
        assert_near(gradients(model), gradients(reference), what=f"{layers}")
        (graph,) = calls._graphs.values()
        assert graph not in graphs
    assert (calls.replays, calls.eager_calls) == (8, 0)


# Ranks


def rank_weights(kind: str, *, overlapped: bool = False, load: Path | None = None, save: Path | None = None) -> Any:
    """Train four batches on each rank, with one other algorithm."""
    technique = LayerFreezing(layers=1)
    algorithms: list[Any] = [technique]
    if kind == "clipped":
        algorithms.append(GradientClipping("norm", clipping_threshold=0.5))
    if kind == "sharded":
        algorithms.append(ShardedOptimizer())
    settings: dict[str, Any] = {**SAVING, "save_folder": str(save)} if save else {}
    settings |= {"load_path": str(load / "ba2.pt")} if load else {}
    callbacks = [OverlappedDDP()] if overlapped else []
    trainer = make_trainer(
        algorithms,
        model=tiny_bert(),
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


KINDS = ("alone", "clipped", "sharded")


def all_ranks(folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind in KINDS:
        for overlapped in (False, True):
            found[kind, overlapped] = rank_weights(kind, overlapped=overlapped)
    found["saved"] = rank_weights("alone", save=folder / str(dist.get_world_size()))
    found["resumed"] = rank_weights("alone", load=folder / str(dist.get_world_size()))
    return found


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The current world size:UserWarning")
def test_two_ranks_train_like_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks, alone = on_ranks(partial(all_ranks, tmp_path)), all_ranks(tmp_path)
    for (kind, overlapped), expected in [(key, value) for key, value in alone.items() if isinstance(key, tuple)]:
        for rank in ranks:
            seen = rank[kind, overlapped]
            assert_equal(seen["weights"], ranks[0][kind, False]["weights"])
            assert_near(seen["weights"], expected["weights"], what=f"{kind}, overlapped: {overlapped}")
            if overlapped:
                assert seen["sums"]["mib_a_step"] * 2**20 == 4 * seen["evidence"]["trained_parameters"], "reduced bytes"
                assert (seen["sums"]["overlapped_steps"] > 0) is (kind == "alone")
    for rank in ranks:
        assert_equal(rank["resumed"]["weights"], rank["saved"]["weights"])


# Evidence, refusals and conflicts


class Thaws(Callback):
    def fit_start(self, state: State, logger: Logger) -> None:
        layer: Any = model_of(state).model.bert.encoder.layer[0]
        layer.output.dense.bias.requires_grad = True


def test_a_frozen_weight_that_trains_is_detected() -> None:
    trainer = make_trainer([LayerFreezing(layers=1)], callbacks=[Thaws()])
    assert_not_engaged(trainer, "layer.0.output.dense.bias requires gradients or has one, although it is frozen")


def test_a_model_in_ddp_is_refused_with_a_fix_that_helps() -> None:
    """In a loop of one's own; DDP without a process group."""
    shared = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(shared)
    shared.module = tiny_bert()
    with pytest.raises(Refusal, match=r"waits for the gradients of all parameters; apply it before DistributedDataP"):
        apply(shared, [LayerFreezing(layers=1)])
    assert not frozen_names(shared)


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (tiny_bert, 3, r"the model has 2 blocks, not 3"),
        (lambda: nn.Linear(2, 2), 1, r"the model has 0 encoders; a model with one encoder of these families is supp"),
        (lambda: nn.ModuleList([tiny_bert(), tiny_bert()]), 1, r"the model has 2 encoders; a model with one encoder"),
        (lambda: tiny_bert().bert.encoder, 1, r"the model has 0 modules of class BertEmbeddings, instead of one"),
        (lambda: tiny_model("bert", "mlm"), 0, r"\S+decoder.weight is tied to the embeddings and would be"),
    ],
)
def test_models_and_numbers_that_cannot_be_frozen_are_refused(model: Any, layers: Any, message: str) -> None:
    built = model()
    with pytest.raises(ValueError, match=f"^{message}") as error:
        freeze(built, (), layers)
    assert "\n" not in str(error.value)
    assert not frozen_names(built)
