"""Every technique trains, engages with evidence, matches the untouched model, and restores process-wide flags.

Those that are not exact in float32 stay within their bound of the untouched run's loss curve over 200 steps.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import composer.algorithms
import pytest
import torch
import yaml
from composer.core import Algorithm, Event, get_precision_context

from composer_speedups.core.host import host_of
from composer_speedups.core.registry import technique_class, technique_names
from composer_speedups.core.technique import Technique
from composer_speedups.train.checkpoints import read_checkpoint, restricted_loading
from tests.core.test_cards import blocks, card
from tests.helpers.common import (
    SAVING,
    Recorder,
    awkward_batches,
    final_weights,
    fit_and_close,
    learnable_batches,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.settings import ENTRIES, Case, cases
from tests.reference.loop import eval_logits, train_plainly
from tests.reference.tolerance import assert_near

every_technique = pytest.mark.parametrize("case", cases())


class Run(NamedTuple):
    """A finished run of four batches with a technique, which saved a checkpoint after two; the Trainer is closed."""

    case: Case
    techniques: list[Technique]
    technique: Technique
    trainer: Any
    checkpoint: str
    heard: list[set[Event]]  # events that the host handles before the first batch and after the last
    flags: list[dict[str, Any]]  # process-wide flags before the run, after fit and after close


@pytest.fixture(scope="module", params=cases())
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train once per case, for all tests that do not need a run of their own."""
    case: Case = request.param
    techniques, flags = case.build_all(), [_process_flags()]
    folder = str(tmp_path_factory.mktemp("run"))
    trainer = make_trainer(techniques, model=tiny_bert(dropout=0.1), save_folder=folder, **SAVING)
    host = host_of(trainer.state)
    heard = [{event for event in Event if host.hears(event.value)}]
    trainer.fit()
    heard.append({event for event in Event if host.hears(event.value)})
    flags.append(_process_flags())
    trainer.close()
    return Run(case, techniques, techniques[-1], trainer, f"{folder}/ba2.pt", heard, [*flags, _process_flags()])


@pytest.mark.pins
def test_a_technique_engages_with_evidence(run: Run) -> None:
    assert run.technique.engaged is True
    for key in run.case.entry.evidence:
        assert run.technique.evidence[key] not in (None, {}, []), f"no {key} in {run.technique.evidence}"


def test_after_the_first_batch_the_host_hears_only_what_a_technique_defines(run: Run) -> None:
    before, after = run.heard
    defined = {event for event in Event for technique in run.techniques if hasattr(technique, event.value)}
    assert before == defined | {
        Event.AFTER_LOAD, Event.BATCH_START, Event.AFTER_FORWARD, Event.BATCH_END, Event.FIT_END
    }  # fmt: skip
    assert after == defined | {Event.AFTER_LOAD, Event.FIT_END}
    assert [event for event in Event if run.technique.match(event, run.trainer.state)] == [Event.INIT]


def test_closing_gives_the_model_its_classes_and_forwards_back(run: Run) -> None:
    if not run.case.entry.stock_checkpoint:
        pytest.skip("adapters and experts stay")
    stock, model = tiny_bert(), run.trainer.state.model.model
    assert [type(module) for module in model.modules()] == [type(module) for module in stock.modules()]
    assert not any("forward" in vars(module) or module._compiled_call_impl for module in model.modules())
    assert model.config._attn_implementation == "eager"


def test_process_flags_are_restored(run: Run) -> None:
    before, after_fit, after_close = run.flags
    assert after_fit == before, "not restored at the end of fit"
    assert after_close == before


def test_the_checkpoint_has_the_stock_parameters(run: Run, tmp_path: Path) -> None:
    if not run.case.entry.stock_checkpoint:
        pytest.skip("the checkpoint's parameters are not the stock ones; see the technique's card")
    stock, model = tiny_bert().to(run.case.entry.weight_dtype), run.trainer.state.model.model
    assert {n: (p.shape, p.dtype) for n, p in model.state_dict().items()} == {
        n: (p.shape, p.dtype) for n, p in stock.state_dict().items()
    }
    model.save_pretrained(tmp_path / "export")
    reloaded = type(stock).from_pretrained(tmp_path / "export")
    assert_near(dict(reloaded.named_parameters()), dict(model.named_parameters()), what="exported weights")


@pytest.mark.pins
def test_resuming_is_exact(run: Run) -> None:
    read_checkpoint(run.checkpoint, "checkpoint.load")
    with restricted_loading(trust=False):  # as train.py loads it
        resumed = trained(run.case.build_all(), model=tiny_bert(dropout=0.1), load_path=run.checkpoint)
    torch.testing.assert_close(final_weights(resumed), final_weights(run.trainer), rtol=0, atol=0)


def test_a_technique_engages_again_in_a_second_trainer(run: Run) -> None:
    """The second run, without a checkpoint, equals the first, and collects evidence of its own first batch."""
    evidence = set(run.case.entry.evidence)
    second = make_trainer(run.techniques, model=tiny_bert(dropout=0.1))
    assert run.technique.engaged is True
    assert not evidence <= set(run.technique.evidence), "evidence of the previous run"
    second.fit()
    assert evidence <= set(run.technique.evidence)
    weights = final_weights(second)
    torch.testing.assert_close(weights, final_weights(run.trainer), rtol=0, atol=0)
    second.fit(duration="2ba")
    again = final_weights(second)
    second.close()
    assert all(weight.isfinite().all() for weight in again.values())
    assert any(not torch.equal(again[name], weight) for name, weight in weights.items()), "a later fit() trains"


def test_a_second_trainer_takes_the_model_over_from_an_open_one(run: Run) -> None:
    """As a notebook's cell that is run again: it builds the new Trainer before the old one is collected."""
    model = tiny_bert(dropout=0.1)
    first = make_trainer(run.techniques, model=model)
    kinds = [type(module) for module in model.modules()]
    second = make_trainer(run.case.build_all(), model=model)
    assert [type(module) for module in model.modules()] == kinds
    first.close()
    assert [type(module) for module in model.modules()] == kinds, "the second Trainer still needs them"
    fit_and_close(second)
    torch.testing.assert_close(final_weights(second), final_weights(run.trainer), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in technique_names() if name != "layer_freezing"])
def test_the_yaml_of_a_card_shows_the_defaults(name: str) -> None:
    shown = yaml.safe_load(blocks(card(name), "yaml")[0])["algorithms"].get(name, {})
    assert repr(technique_class(name)(**shown)) == repr(technique_class(name)())


@every_technique
@pytest.mark.pins
def test_a_technique_is_an_algorithm_of_composers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On resume, Composer evaluates in its own namespace what an algorithm that is required on load recorded."""
    technique = case.build()
    kind, name = type(technique), type(technique).__name__
    composers = getattr(composer.algorithms, name, None)
    assert composers is None or not composers.required_on_load(), "Composer would apply its own"
    monkeypatch.setattr(composer.algorithms, name, kind, raising=False)
    again = eval(f"composer.algorithms.{technique!r}", {"composer": composer})
    assert (type(again), repr(again)) == (kind, repr(technique))
    assert issubclass(kind, Algorithm)
    assert kind.required_on_load() is technique.required_on_load() is not ENTRIES[case.name].stock_checkpoint
    kind()  # Composer's tests construct algorithms without arguments


@pytest.mark.parametrize("gpu", [False, True])
def test_the_tolerances_match_the_declared_effect(gpu: bool) -> None:
    for case in (parameter.values[0] for parameter in cases(gpu=gpu)):
        kind, entry = case.effect(gpu=gpu), case.entry
        assert (entry.loss_bound is not None) == (kind in ("lower_precision", "recipe")), case.id
        assert entry.dtype == entry.weight_dtype == torch.float32 or kind in ("lower_precision", "recipe"), case.id
        assert entry.weight_dtype == torch.float32 or kind == "recipe", case.id
        assert len(entry.same) == 4 or kind == "recipe", f"{case.id}: only a recipe may differ from the untouched model"


def also_on_a_gpu(on_a_cpu: list[Any], on_a_gpu: list[Any]) -> pytest.MarkDecorator:
    further = [pytest.param(*p.values, True, id=f"{p.id}-gpu", marks=[*p.marks, pytest.mark.gpu]) for p in on_a_gpu]
    return pytest.mark.parametrize(
        ("case", "gpu"), [*(pytest.param(*p.values, False, id=p.id, marks=p.marks) for p in on_a_cpu), *further]
    )


@also_on_a_gpu(others_exhaustive(cases(), lambda case: case.name != "torch_compile"), cases(gpu=True))  # it takes 10 s
@pytest.mark.pins
def test_outputs_gradients_and_weights_match_the_untouched_model(case: Case, gpu: bool) -> None:
    model, batches, dtype = tiny_bert(), awkward_batches(), case.entry.dtype
    expected = train_plainly(model, batches)
    recorder = Recorder()
    trainer = make_trainer(case.build_all(), model=copy.deepcopy(model), batches=batches, callbacks=[recorder], gpu=gpu)
    device = next(trainer.state.model.parameters()).device
    on_device = [{k: v.to(device) for k, v in b.items()} for b in batches]
    with get_precision_context(trainer.state.precision):
        logits = [x.cpu() for x in eval_logits(trainer.state.model.model, on_device)]
    if "logits" in case.entry.same:
        assert_near(logits, expected.logits, dtype, "logits in eval mode")
    if trainer.state.precision.value == "amp_fp16":  # the default scale of 65536 skips the first steps
        trainer.state.scaler = torch.amp.GradScaler(init_scale=128)
    fit_and_close(trainer)
    trained = {n.removeprefix("model."): w for n, w in final_weights(trainer).items()}
    if "losses" in case.entry.same:
        assert_near(recorder.losses, expected.losses, dtype, "losses")
    if "gradients" in case.entry.same:
        first = {n: g.cpu() for n, g in recorder.first_gradients.items()}
        assert_near(first, expected.first_gradients, dtype, "gradients of the first batch")
    if "weights" in case.entry.same:
        assert_near(trained, expected.weights, dtype, "weights after training")
    elif case.effect(gpu=gpu) == "recipe" and trained.keys() == expected.weights.keys():
        with pytest.raises(AssertionError):
            assert_near(trained, expected.weights, dtype, "another recipe trains other weights")


def _process_flags() -> dict[str, Any]:
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "dispatch_modes": torch._C._len_torch_dispatch_stack(),
    }


WINDOW = 20  # steps of the moving average; the loss of one batch of 16 rows is too noisy


def inexact(*, gpu: bool) -> list[Any]:
    return [c for c in cases(gpu=gpu) if c.values[0].entry.loss_bound is not None]


@also_on_a_gpu(others_exhaustive(inexact(gpu=False), lambda case: False), inexact(gpu=True))
def test_the_loss_curve_stays_within_its_bound(case: Case, gpu: bool) -> None:
    expected, actual = _reference(), _curve(case.build_all(), gpu=gpu)
    distance = float((actual - expected).abs().max())
    assert distance <= case.entry.loss_bound, f"the loss differs by {distance:.3f} from the untouched run's"


@cache
def _reference() -> torch.Tensor:
    curve = _curve([])
    assert curve[-1] < 0.6 * curve[0], "the reference run must learn"
    return curve


def _curve(algorithms: list[Any], *, gpu: bool = False) -> torch.Tensor:
    recorder = Recorder()
    trained(algorithms, batches=learnable_batches(), callbacks=[recorder], gpu=gpu)
    losses = torch.tensor(recorder.losses)
    assert len(losses) == 200
    assert losses.isfinite().all()
    return losses.unfold(0, WINDOW, 1).mean(-1)


@every_technique
def test_a_failed_run_restores_the_process_flags(case: Case) -> None:
    before = _process_flags()
    bad = plain_batches(1)
    bad[0]["input_ids"] = bad[0]["input_ids"] + 10_000  # not in the vocabulary
    with pytest.raises(Exception, match=r"index|Index|range"):
        trained(case.build_all(), batches=bad)
    assert _process_flags() == before
