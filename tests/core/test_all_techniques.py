"""Every technique trains, engages with evidence, matches the untouched model, and leaves nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.core import Event

from composer_speedups.core.technique import Technique
from composer_speedups.train.checkpoints.reading import check_checkpoint, restricted_loading
from tests.helpers.common import (
    Recorder,
    awkward_batches,
    final_weights,
    make_trainer,
    plain_batches,
    tiny_bert,
)
from tests.helpers.settings import Case, cases
from tests.reference.loop import eval_logits, train_plainly
from tests.reference.tolerance import assert_near

every_technique = pytest.mark.parametrize("case", cases())


@every_technique
@pytest.mark.pins
def test_it_engages_and_leaves_evidence(case: Case) -> None:
    technique = case.build_all()[-1]
    trainer = make_trainer([*case.build_all()[:-1], technique])
    trainer.fit()
    trainer.close()
    assert technique.engaged is True
    for key in case.entry.evidence:
        assert technique.evidence[key] not in (None, {}, []), f"no {key} in {technique.evidence}"


@pytest.mark.parametrize("gpu", [False, True])
def test_its_tests_hold_it_to_the_exactness_that_its_class_states(gpu: bool) -> None:
    for case in (parameter.values[0] for parameter in cases(gpu=gpu)):
        kind, entry = case.exactness(gpu=gpu), case.entry
        assert (entry.loss_bound is not None) == (kind in ("lower_precision", "recipe")), case.id
        assert entry.dtype == entry.weight_dtype == torch.float32 or kind in ("lower_precision", "recipe"), case.id
        assert entry.weight_dtype == torch.float32 or kind == "recipe", case.id
        assert len(entry.same) == 4 or kind == "recipe", f"{case.id}: what is not the same is another recipe"


@every_technique
@pytest.mark.pins
def test_it_verifies_after_the_first_batch_and_at_the_end_and_never_else(case: Case) -> None:
    technique, at = case.build_all()[-1], list[tuple[int, bool]]()
    verify = technique.verify

    def count(state: Any) -> dict[str, Any]:
        at.append((state.timestamp.batch.value, technique.ended))
        return verify(state)

    technique.verify = count  # type: ignore[method-assign]
    trainer = make_trainer([*case.build_all()[:-1], technique], batches=plain_batches(4))
    trainer.fit()
    trainer.close()
    assert at == [(1, False), (4, True)]


@every_technique
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
    with _precision(trainer):
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


def _precision(trainer: Any) -> Any:
    from composer.core import get_precision_context

    return get_precision_context(trainer.state.precision)


@every_technique
def test_the_checkpoint_is_the_stock_one(case: Case, tmp_path: Any) -> None:
    if not case.entry.stock_checkpoint:
        pytest.skip("its checkpoint is its library's own; see its card")
    stock = tiny_bert().to(case.entry.weight_dtype)
    trainer = make_trainer(case.build_all())
    trainer.fit()
    trainer.close()
    assert {n: (p.shape, p.dtype) for n, p in trainer.state.model.model.state_dict().items()} == {
        n: (p.shape, p.dtype) for n, p in stock.state_dict().items()
    }
    trainer.state.model.model.save_pretrained(tmp_path / "export")
    reloaded = type(stock).from_pretrained(tmp_path / "export")
    assert_near(
        dict(reloaded.named_parameters()),
        dict(trainer.state.model.model.named_parameters()),
        what="exported weights",
    )


@every_technique
@pytest.mark.pins
def test_resuming_is_exact(case: Case, tmp_path: Any) -> None:
    batches = plain_batches(4)

    def run(**kwargs: Any) -> dict[str, torch.Tensor]:
        trainer = make_trainer(case.build_all(), model=tiny_bert(dropout=0.1), batches=batches, **kwargs)
        trainer.fit()
        trainer.close()
        return final_weights(trainer)

    uninterrupted = run()
    run(
        save_folder=str(tmp_path),
        save_interval="2ba",
        save_filename="ba{batch}.pt",
        save_latest_filename=None,
    )
    check_checkpoint(str(tmp_path / "ba2.pt"), "checkpoint.load")
    with restricted_loading("checkpoint.load", trust=False):  # as train.py loads it
        resumed = run(load_path=str(tmp_path / "ba2.pt"))
    torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)
    assert (tmp_path / "ba2.pt").exists()


@every_technique
def test_engaging_twice_changes_nothing_more(case: Case) -> None:
    once, twice = make_trainer(case.build_all()), make_trainer(case.build_all())
    for technique in _techniques(twice):
        technique.apply(Event.INIT, twice.state, twice.logger)  # as a second Trainer on the model would
        technique.engage(twice.state)
    once.fit()
    twice.fit()
    once.close()
    twice.close()
    torch.testing.assert_close(final_weights(twice), final_weights(once), rtol=0, atol=0)


@every_technique
def test_flags_are_given_back(case: Case) -> None:
    before = _process_flags()
    trainer = make_trainer(case.build_all())
    trainer.fit()
    assert _process_flags() == before, "not given back at the end of fit"
    trainer.close()
    assert _process_flags() == before


@every_technique
def test_flags_are_given_back_by_a_run_that_fails(case: Case) -> None:
    before = _process_flags()
    bad = plain_batches(1)
    bad[0]["input_ids"] = bad[0]["input_ids"] + 10_000  # no such token
    trainer = make_trainer(case.build_all(), batches=bad)
    with pytest.raises(Exception, match=r"index|Index|range"):
        trainer.fit()
    trainer.close()
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


@every_technique
def test_its_repr_builds_it_again(case: Case) -> None:
    technique = case.build()
    again = eval(repr(technique), {type(technique).__name__: type(technique)})
    assert repr(again) == repr(technique)


def _techniques(trainer: Any) -> list[Technique]:
    return [a for a in trainer.state.algorithms if isinstance(a, Technique)]
