"""Every technique trains, engages with evidence, matches the untouched model, and restores process-wide flags."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from composer.core import Event, get_precision_context

from composer_speedups.core.technique import Technique, techniques_of
from composer_speedups.train.checkpoints.reading import read_checkpoint, restricted_loading
from tests.helpers.common import (
    SAVING,
    Recorder,
    awkward_batches,
    final_weights,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.settings import Case, cases
from tests.reference.loop import eval_logits, train_plainly
from tests.reference.tolerance import assert_near

every_technique = pytest.mark.parametrize("case", cases())


class Run(NamedTuple):
    """A finished run of four batches with a technique, which saved a checkpoint after two; the Trainer is closed."""

    case: Case
    techniques: list[Technique]
    technique: Technique
    evidence: dict[str, Any]  # at the end of the run
    trainer: Any
    checkpoint: str
    verified: list[tuple[int, bool]]  # at each call of verify: trained batches, and whether training had ended
    matched: list[set[Event]]  # events before the first batch and after the last
    flags: list[dict[str, Any]]  # process-wide flags before the run, after fit and after close


@pytest.fixture(scope="module", params=cases())
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train once per case, for all tests that do not need a run of their own."""
    case: Case = request.param
    techniques, verified, flags = case.build_all(), list[tuple[int, bool]](), [_process_flags()]
    technique = techniques[-1]
    verify = technique.verify

    def count(state: Any) -> dict[str, Any]:
        verified.append((state.timestamp.batch.value, technique.ended))
        return verify(state)

    folder = str(tmp_path_factory.mktemp("run"))
    trainer = make_trainer(techniques, model=tiny_bert(dropout=0.1), save_folder=folder, **SAVING)
    technique.verify = count  # type: ignore[method-assign]
    matched = [_matched(technique, trainer)]
    trainer.fit()
    matched.append(_matched(technique, trainer))
    flags.append(_process_flags())
    trainer.close()
    del technique.verify
    checkpoint, flags = f"{folder}/ba2.pt", [*flags, _process_flags()]
    return Run(case, techniques, technique, dict(technique.evidence), trainer, checkpoint, verified, matched, flags)


def _matched(technique: Technique, trainer: Any) -> set[Event]:
    return {event for event in Event if technique.match(event, trainer.state)}


@pytest.mark.pins
def test_a_technique_engages_with_evidence(run: Run) -> None:
    assert run.technique.engaged is True
    for key in run.case.entry.evidence:
        assert run.evidence[key] not in (None, {}, []), f"no {key} in {run.evidence}"


@pytest.mark.pins
def test_verify_runs_only_after_the_first_batch_and_at_the_end(run: Run) -> None:
    assert run.verified == [(1, False), (4, True)]


def test_after_the_first_batch_only_events_that_it_handles_match(run: Run) -> None:
    before, after = run.matched
    assert {Event.INIT, Event.BATCH_END} <= before < set(Event)
    assert after == before & {Event.INIT, Event.AFTER_LOAD, Event.FIT_END, *type(run.technique)._heard}


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


def test_a_technique_engages_again_in_a_second_trainer_and_engaging_twice_changes_nothing(run: Run) -> None:
    """The second run, without a checkpoint, equals the first, and collects evidence of its own first batch."""
    evidence = set(run.case.entry.evidence)
    second = make_trainer(run.techniques, model=tiny_bert(dropout=0.1))
    assert run.technique.engaged is True
    assert not evidence <= set(run.technique.evidence), "evidence of the previous run"
    changed = copy.deepcopy(second.state.model)
    for technique in techniques_of(second.state.algorithms):
        technique.apply(Event.INIT, second.state, second.logger)
        technique.engage(second.state)
    _assert_same_model(second.state.model, changed)
    second.fit()
    assert evidence <= set(run.technique.evidence)
    weights = final_weights(second)
    torch.testing.assert_close(weights, final_weights(run.trainer), rtol=0, atol=0)
    second.fit(duration="2ba")
    again = final_weights(second)
    second.close()
    assert all(weight.isfinite().all() for weight in again.values())
    assert any(not torch.equal(again[name], weight) for name, weight in weights.items()), "a later fit() trains"
    third = make_trainer(run.techniques, model=copy.deepcopy(changed))  # as in Composer's test of idempotence
    assert run.technique.engaged is True
    _assert_same_model(third.state.model, changed)
    third.close()


def _assert_same_model(model: Any, expected: Any) -> None:
    assert [type(module) for module in model.modules()] == [type(module) for module in expected.modules()]
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_tolerances_match_the_declared_exactness(gpu: bool) -> None:
    for case in (parameter.values[0] for parameter in cases(gpu=gpu)):
        kind, entry = case.exactness(gpu=gpu), case.entry
        assert (entry.loss_bound is not None) == (kind in ("lower_precision", "recipe")), case.id
        assert entry.dtype == entry.weight_dtype == torch.float32 or kind in ("lower_precision", "recipe"), case.id
        assert entry.weight_dtype == torch.float32 or kind == "recipe", case.id
        assert len(entry.same) == 4 or kind == "recipe", f"{case.id}: only a recipe may differ from the untouched model"


@pytest.mark.parametrize("case", others_exhaustive(cases(), lambda case: case.name != "torch_compile"))  # it takes 10 s
@pytest.mark.pins
def test_outputs_gradients_and_weights_match_the_untouched_model(case: Case) -> None:
    _check_parity(case, gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(gpu=True))
def test_outputs_gradients_and_weights_match_the_untouched_model_on_a_gpu(case: Case) -> None:
    _check_parity(case, gpu=True)


def _check_parity(case: Case, *, gpu: bool) -> None:
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
    trainer.fit()
    trainer.close()
    if "losses" in case.entry.same:
        assert_near(recorder.losses, expected.losses, dtype, "losses")
    if "gradients" in case.entry.same:
        first = {n: g.cpu() for n, g in recorder.first_gradients.items()}
        assert_near(first, expected.first_gradients, dtype, "gradients of the first batch")
    if "weights" in case.entry.same:
        trained = {n.removeprefix("model."): w for n, w in final_weights(trainer).items()}
        assert_near(trained, expected.weights, dtype, "weights after training")


@every_technique
def test_a_failed_run_restores_the_process_flags(case: Case) -> None:
    before = _process_flags()
    bad = plain_batches(1)
    bad[0]["input_ids"] = bad[0]["input_ids"] + 10_000  # not in the vocabulary
    with pytest.raises(Exception, match=r"index|Index|range"):
        trained(case.build_all(), batches=bad)
    assert _process_flags() == before


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
