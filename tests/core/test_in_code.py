"""Techniques in users' own code: Trainers with stock Composer models, and plain modules in other loops.

Every technique of tests/helpers/settings.py either works or is refused in one line, by a Refusal with its name. On a
CPU, techniques that need a GPU are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.devices import DeviceCPU
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, HuggingFaceModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification

from composer_speedups import CUDAGraphs, Unpadding, apply, with_row_lengths
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import technique_class
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import NOT_YET, Order, Technique
from tests.helpers.common import final_weights, fit_and_close, plain_batches, tiny_config
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.settings import ENTRIES, Case


def vectors() -> DataLoader[Any]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    rows: Any = [(row, int(row.sum() > 0)) for row in x]
    return DataLoader(rows, batch_size=4)


def mlp() -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))
    return ComposerClassifier(layers, num_classes=2), vectors()


def bert() -> tuple[Any, Any]:
    """Build BERT as users do: default attention implementation, no tokenizer, rows collated by the DataLoader."""
    torch.manual_seed(0)
    rows: Any = [{k: v[i] for k, v in batch.items()} for batch in plain_batches(3) for i in range(4)]
    model = AutoModelForSequenceClassification.from_config(tiny_config())
    return HuggingFaceModel(model, use_logits=True), DataLoader(rows, batch_size=4)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {"mlp": mlp, "bert": bert}
CASES = others_exhaustive(
    (
        pytest.param(case, id=case.id)
        for name, entry in sorted(ENTRIES.items())
        for arguments in entry.variants or entry.gpu_variants  # variants for a GPU are refused
        for case in [Case(name, tuple(arguments.items()), entry)]
    ),
    lambda case: dict(case.arguments) == (case.entry.variants or case.entry.gpu_variants)[0],
)


def train(techniques: list[Technique], model: Any, loader: Any) -> Trainer:
    """Train with a plain Composer Trainer and stock AdamW; only the techniques are from this package."""
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_duration="2ba",
        algorithms=techniques,
        precision="fp32",
        device=DeviceCPU(),
        loggers=[InMemoryLogger()],
        progress_bar=False,
        seed=1,
    )
    return fit_and_close(trainer)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_a_stock_composer_model_trains_or_the_technique_is_refused(case: Case, model: str) -> None:
    techniques = case.build_all()
    refusal = trainer = None
    try:
        trainer = train(techniques, *MODELS[model]())
    except Refusal as error:
        refusal = error
    if refusal is not None:
        assert model != "bert" or not case.entry.variants, refusal
        assert refusal.who in {"techniques", *(t.name for t in techniques)}
        assert str(refusal).startswith(f"{refusal.who}: ")
        assert "\n" not in str(refusal)
        assert refusal.fix
        return
    assert all(t.engaged for t in techniques)
    assert set(case.entry.evidence) <= set(techniques[-1].evidence)
    assert all(w.isfinite().all() for w in final_weights(trainer).values())


def _first(name: str) -> Technique:
    return technique_class(name)(**ENTRIES[name].variants[0])


IN_VAIN = {  # on the small plain modules
    "bnb_optimizer": "the model is too small for it",
    "lowbit_optimizer": "the model is too small for it",
    "torch_compile": "without a compiled graph",  # Dynamo skips torch's own classes, such as a bare nn.Sequential
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_apply_works_on_a_plain_module_or_refuses(case: Case, kind: str) -> None:
    """Apply the techniques, train for two steps without Composer, and undo."""
    wrapped, loader = MODELS[kind]()
    model: Any = wrapped.model if kind == "bert" else wrapped.module
    techniques = case.build_all()
    flag, kinds = torch.get_float32_matmul_precision(), [type(module) for module in model.modules()]
    applied = refusal = None
    try:
        applied = apply(model, techniques, torch.optim.AdamW(model.parameters(), lr=1e-3))
    except Refusal as error:
        refusal = error
    if refusal is not None or applied is None:
        assert refusal is not None
        assert kind != "bert" or not case.entry.variants or "Composer" in refusal.reason, refusal
        assert refusal.who in {"techniques", *(t.name for t in techniques)}
        assert refusal.reason
        assert refusal.fix
        assert "\n" not in str(refusal)
        assert [type(module) for module in model.modules()] == kinds
        return
    optimizer: Any = applied.optimizer
    model.train()
    vain = "" if kind == "bert" else IN_VAIN.get(case.name, "")
    with pytest.raises(Refusal, match=vain) if vain else nullcontext():
        for batch in itertools.islice(loader, 2):
            loss = _loss(model, batch)
            assert loss.isfinite()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if vain:
        return
    of_composers_events = {"first_batch_packed", "padding_of_the_run"}
    assert set(case.entry.evidence) - of_composers_events <= set(applied.evidence[case.name])
    assert all(p.isfinite().all() for p in model.parameters())
    applied.undo()
    assert torch.get_float32_matmul_precision() == flag
    if case.entry.stock_checkpoint:
        assert [type(module) for module in model.modules()] == kinds


def test_a_technique_without_effect_raises_at_the_step_and_another_set_is_refused() -> None:
    model: Any = bert()[0].model
    applied = apply(model, [_first("gradient_checkpointing")], optimizer := torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(Refusal, match=r"^techniques: the model is in use with \[GradientCheckpointing.*undo\(\)"):
        apply(model, [_first("fast_layernorm"), _first("mixed_precision")])
    model.train()
    for block in model.bert.encoder.layer:
        del block.forward
    _loss(model, plain_batches(1)[0]).backward()
    with pytest.raises(Refusal, match=r"^gradient_checkpointing: was applied but did not take effect"):
        optimizer.step()
    assert torch._C._len_torch_dispatch_stack() == 0
    applied.undo()


@pytest.mark.parametrize("compiled", ["wrapped", "in place"])
def test_a_compiled_model_is_observed(compiled: str) -> None:
    model: Any = bert()[0].model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if compiled == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    applied = apply(model, [Unpadding()], optimizer)
    model(**plain_batches(1)[0]).loss.backward()
    optimizer.step()
    assert "attention" in applied.evidence["unpadding"]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_model_that_is_compiled_later_is_refused_and_the_message_says_so() -> None:
    model: Any = bert()[0].model
    apply(model, [Unpadding()], optimizer := torch.optim.SGD(model.parameters(), lr=1e-3))
    torch.compile(model, backend="eager")(**plain_batches(1)[0]).loss.backward()
    with pytest.raises(
        Refusal, match=r"^unpadding: was applied but did not take effect.* do not compile it afterwards"
    ):
        optimizer.step()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of transformers
def test_a_trace_before_the_first_batch_is_not_observed() -> None:
    model: Any = bert()[0].model.eval()
    inputs = plain_batches(1)[0]
    expected = model(**inputs).logits
    apply(model, [Unpadding()])
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    traced = torch.jit.trace(Logits(model), tuple(given.values()))
    torch.testing.assert_close(traced(*given.values()), expected)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask).logits  # type: ignore[no-any-return]


def test_what_needs_a_gpu_says_to_move_the_model_there() -> None:
    message = r"needs a CUDA GPU, and this run is on the cpu; move the model to one first, or remove the technique$"
    with pytest.raises(Refusal, match=message):
        apply(bert()[0].model, [CUDAGraphs()])


def test_an_algorithm_of_composer_is_refused_by_apply() -> None:
    with pytest.raises(Refusal, match=r"GradientClipping.* is Composer's; only Composer's Trainer can apply it$"):
        apply(bert()[0].model, [GradientClipping("norm", 1.0), Unpadding()])  # type: ignore[list-item]


def test_after_the_first_batch_no_hook_watches_the_model_or_its_optimizer() -> None:
    model: Any = bert()[0].model
    watching = len(torch_optimizer._global_optimizer_post_hooks)
    applied = apply(model, [Unpadding()], optimizer := torch.optim.SGD(model.parameters(), lr=1e-3))
    hooks = len(model._forward_pre_hooks)
    for batch in plain_batches(3):
        model(**batch).loss.backward()
        optimizer.step()
    assert "attention" in applied.evidence["unpadding"]
    assert len(torch_optimizer._global_optimizer_post_hooks) == watching
    assert len(model._forward_pre_hooks) == hooks - 1


@pytest.mark.parametrize("padded_on_the_left", [False, True])
def test_a_model_that_trains_in_evaluation_mode_is_observed_too(padded_on_the_left: bool) -> None:
    """As Lightning trains what ``from_pretrained`` returns; the collator has counted the rows."""
    model = AutoModelForSequenceClassification.from_config(tiny_config()).eval()
    applied = apply(model, [Unpadding()], optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = plain_batches(1)[0]
    if padded_on_the_left:
        inputs |= {name: inputs[name].flip(1) for name in ("input_ids", "attention_mask")}
    collate = with_row_lengths(lambda given: given, model)
    model(**collate(inputs)).loss.backward()
    with pytest.raises(Refusal, match="pad on the right") if padded_on_the_left else nullcontext():
        optimizer.step()
    assert ("attention" in applied.evidence["unpadding"]) is not padded_on_the_left


def _loss(model: Any, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return model(**batch).loss
    return F.cross_entropy(model(batch[0]).float(), batch[1])


@pytest.mark.pins
@pytest.mark.parametrize("around", ["forward", "backward and step"])
def test_a_dispatch_mode_of_the_loop_delays_the_observation(around: str) -> None:
    model = AutoModelForSequenceClassification.from_config(tiny_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    applied = apply(model, [Unpadding()], optimizer)
    for step, batch in enumerate(plain_batches(2)):
        with FlopCounterMode(display=False) if step == 0 and around == "forward" else nullcontext():
            loss = model(**batch).loss
        with FlopCounterMode(display=False) if step == 0 and around != "forward" else nullcontext():
            loss.backward()
            optimizer.step()
        assert ("attention" in applied.evidence["unpadding"]) is (step == 1)  # from its proof
    assert _get_current_dispatch_mode() is None
    hooks = torch_optimizer._global_optimizer_post_hooks.values()
    assert hooks
    assert not any(getattr(hook, "reads_gradients", True) for hook in hooks)


class OnlyEvents(Technique):
    """Acts in events of Composer, which other loops do not have."""

    name = "only_events"
    order = Order.FLAGS
    effect = "recipe"

    def reset(self) -> None:
        super().reset()
        self._batches = 0

    def engage(self, run: Run) -> dict[str, Any]:
        return {}

    def batch_end(self, run: Run) -> None:
        self._batches += 1

    def proof(self, run: Run, seen: FirstBatch) -> Any:
        return {"batches": self._batches} if self._batches else NOT_YET


class Counts(OnlyEvents):
    """Counts something that it is not told of by events."""

    name = "counts"

    def proof(self, run: Run, seen: FirstBatch) -> Any:
        return {"proved": True}

    def summary(self, run: Run) -> dict[str, Any]:
        self._batches += 1
        return {"asked": self._batches}


def test_after_the_proof_the_evidence_has_what_a_technique_has_counted_since() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = apply(model, [Counts()], optimizer)
    assert applied.evidence == {"counts": {}}
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [applied.evidence for _ in range(2)] == [{"counts": {"proved": True, "asked": n}} for n in (1, 2)]


def test_a_technique_of_which_nothing_is_seen_in_twenty_batches_is_refused() -> None:
    model, steps = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    apply(model, [OnlyEvents()], optimizer)

    def train() -> None:
        for _ in range(100):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    with pytest.raises(Refusal, match="only_events: was applied but did not take effect: nothing was seen of it"):
        train()
    assert len(steps) == 20
