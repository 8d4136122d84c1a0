"""The optimizer's step as a graph, on a CPU with a stand-in recorder, beside an untouched optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

from composer_speedups import CUDAGraphs
from composer_speedups.algorithms.cuda_graphs.optimizer_step import OptimizerStep, cannot_replay
from tests.helpers.common import batch, tiny_bert
from tests.helpers.rerun import CannotRecord, graphed


class Replay:
    """A recorder whose replay steps with the groups and gradients of its capture, as a graph does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def record(self, run: Callable[[], Any]) -> tuple[None, Callable[[], None]]:
        groups = self.optimizer.param_groups
        captured = [dict(group) for group in groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        gradients = {p: None if p.grad is None else p.grad.detach() for p in parameters}  # their memory

        def exchange(gradients: dict[Any, Any]) -> dict[Any, Any]:
            now = {parameter: parameter.grad for parameter in gradients}
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            return now

        def replay() -> None:
            now, gradients_now = [dict(group) for group in groups], exchange(gradients)
            for group, then in zip(groups, captured, strict=True):
                group.update(then)
            run()
            exchange(gradients_now)
            for group, before in zip(groups, now, strict=True):
                group.update(before)

        return None, replay


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4, generator=generator)) for _ in range(4)]


def optimizer_of(trained: list[nn.Parameter], kind: Any = AdamW) -> Any:
    groups = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.0, "lr": 0.03}]
    return kind(groups, lr=0.01, fused=True)


def three_steps(optimizer: Any, trained: list[nn.Parameter], buffers: list[Tensor]) -> None:
    for _ in range(3):
        for parameter, buffer in zip(trained, buffers, strict=False):
            parameter.grad = buffer
        optimizer.step()


class Training:
    """Trains with gradients in the same memory in every step, as replayed backward passes write them."""

    def __init__(self, *, captured: bool, kind: Any = AdamW) -> None:
        self.trained = parameters()
        self.buffers = [torch.zeros_like(p) for p in self.trained[:3]]  # the last parameter never gets a gradient
        self.optimizer = optimizer_of(self.trained, kind)
        self.step = OptimizerStep(self.optimizer, lambda: Replay(self.optimizer)) if captured else None
        self.batch = 0

    def train(self, steps: int, *, fresh: bool = False, rounded: bool = True, only: slice = slice(3)) -> None:
        """Only some parameters get gradients. ``fresh`` gradients are other tensors in every step.

        ``rounded`` rounds the untouched optimizer's rates.
        """
        for _ in range(steps):
            self.batch += 1

            def closure() -> Tensor:
                pairs = [*enumerate(zip(self.trained, self.buffers, strict=False))]
                for i, (parameter, buffer) in pairs[only]:
                    buffer.copy_(torch.sin(torch.arange(12.0).view(3, 4) * (i + 1) + self.batch))
                    parameter.grad = buffer.clone() if fresh else buffer
                return torch.tensor(float(self.batch))

            rates = [group["lr"] for group in self.optimizer.param_groups]
            if self.step is None and rounded:
                for group in self.optimizer.param_groups:
                    group["lr"] = float(np.float32(group["lr"]))
            assert float(self.optimizer.step(closure)) == self.batch
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def values(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.trained]


def both(change: Callable[[Training], None], kind: Any = AdamW) -> Training:
    """Make the same changes to a replayed and an untouched optimizer, and compare their parameters bit by bit."""
    ours, untouched = Training(captured=True, kind=kind), Training(captured=False, kind=kind)
    for training in (ours, untouched):
        change(training)
    torch.testing.assert_close(ours.values(), untouched.values(), rtol=0, atol=0)
    return ours


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_replays_equal_eager_steps(kind: Any) -> None:
    assert both(lambda training: training.train(8), kind).step.replays == 7


@pytest.mark.parametrize("first", [True, False])
def test_a_schedule_sets_the_rate_of_replays_and_counts_them(first: bool) -> None:
    def change(training: Training) -> None:
        if first:  # the scheduler wraps the step before it is replaced
            if training.step is not None:
                training.step.release()
            schedule = LambdaLR(training.optimizer, lambda step: math.cos(step / 7))
            if training.step is not None:
                training.step = OptimizerStep(training.optimizer, lambda: Replay(training.optimizer))
        else:
            schedule = LambdaLR(training.optimizer, lambda step: math.cos(step / 7))
        for _ in range(9):
            training.train(1)
            schedule.step()  # warns, which is an error here, if no step was counted

    ours = both(change)
    assert ours.step.replays == 8
    assert all(isinstance(group["lr"], float) and not group["capturable"] for group in ours.optimizer.param_groups)


def test_only_a_rate_that_changed_is_written_to_the_device() -> None:
    training = Training(captured=True)
    training.train(4)
    step: Any = training.step
    written = [rate._version for rate in step._rates]
    training.train(2)
    assert [rate._version for rate in step._rates] == written
    training.optimizer.param_groups[1]["lr"] = 0.02
    training.train(2)
    assert [rate._version for rate in step._rates] == [written[0], written[1] + 1]


def test_other_gradients_are_read() -> None:
    def change(training: Training) -> None:
        training.train(3)
        training.train(3, fresh=True)
        training.train(3)
        training.trained[1].grad = None
        training.buffers[1] = torch.zeros(3, 4)  # only this one is another tensor
        training.train(3)

    assert both(change).step.replays == 2 + 0 + 3 + 3


def test_other_tensors_with_the_same_memory_are_read() -> None:
    """Without Composer, autograd's gradients are new views of the captured ones in every step."""

    def change(training: Training) -> None:
        for _ in range(5):
            training.train(1)
            training.buffers = [buffer.view_as(buffer) for buffer in training.buffers]
        training.buffers[1] = training.buffers[1].clone()  # the graph would read the old memory
        training.train(3)
        training.buffers[2] = training.buffers[2].clone()  # the last one of those that are trained
        training.train(3)

    assert both(change).step.replays == 4 + 3 + 2


def test_gradients_with_other_memory_are_read() -> None:
    """The same tensors, whose ``data`` a callback has set."""

    def change(training: Training) -> None:
        training.train(3)
        for buffer in training.buffers:
            buffer.data = buffer.data.clone()
        training.train(3)

    assert both(change).step.replays == 2 + 3


# Steps of a loop of one's own: what each step does, and the number of replayed steps.
LOOPS: dict[str, tuple[str, int]] = {
    "one backward pass": ("1111111", 6),
    "gradients are zeroed in place": ("00000000", 6),
    "two backward passes": ("222222", 0),
    "two backward passes at times": ("1112112", 4),
    "a frozen parameter": ("1111f1111t1111", 3 + 4 + 4),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_ones_own(name: str) -> None:
    steps, replays = LOOPS[name]
    losses, values = [], []
    for captured in (True, False):
        model = tiny_bert(dropout=0.1)
        optimizer: Any = AdamW(model.parameters(), lr=2**-8, fused=True)
        if captured:
            technique = CUDAGraphs()
            technique._control(calls := graphed(model))
            step = technique._step = OptimizerStep(optimizer, lambda: Replay(optimizer), failed=calls.forget)  # noqa: B023
        torch.manual_seed(0)
        for number, what in enumerate(steps):
            if what in "ft":
                model.bert.encoder.layer[0].requires_grad_(what == "t")
            for part in range(2 if what == "2" else 1):
                loss = model(**batch([4, 6], seed=2 * number + part)).loss
                loss.backward()
                losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=what != "0")
        values.append([*model.parameters()])
    torch.testing.assert_close(*values)
    torch.testing.assert_close(losses[: len(losses) // 2], losses[len(losses) // 2 :])
    assert (step.replays, step.note) == (replays, None)


def test_a_loaded_state_and_changed_settings_are_read() -> None:
    def change(training: Training) -> None:
        training.train(4)
        saved = training.optimizer.state_dict()
        training.train(2)
        training.optimizer.load_state_dict(saved)
        training.train(3)
        training.optimizer.param_groups[0]["weight_decay"] = 0.3
        training.train(3)
        training.optimizer.param_groups[1]["betas"] = (0.5, 0.9)
        training.train(3)

    ours = both(change)
    assert ours.step.replays > 8
    assert ours.step.note is None


def test_a_state_that_does_not_exist_is_made_by_an_eager_step() -> None:
    """In a graph, it would be made anew in every replay."""
    ours = Training(captured=True)
    ours.train(4)
    fresh = optimizer_of(parameters()).state_dict()
    for empty in (
        lambda: ours.optimizer.load_state_dict(fresh),
        lambda: ours.optimizer.state.clear(),
        lambda: ours.optimizer.state.pop(ours.trained[1]),
    ):
        before = ours.step.replays
        empty()
        ours.train(1)
        assert ours.step.replays == before
        assert all(ours.optimizer.state[parameter] for parameter in ours.trained[:3])
        ours.train(2)
        assert ours.step.replays > before


def test_a_first_gradient_makes_its_state_eagerly() -> None:
    ours = Training(captured=True)
    buffer = ours.buffers[0]
    ours.buffers[0] = None  # type: ignore[call-overload]
    ours.trained[0].grad = None
    ours.train(4, only=slice(1, 3))
    ours.buffers[0] = buffer
    before = ours.step.replays
    ours.train(1)
    assert ours.step.replays == before
    assert float(ours.optimizer.state[ours.trained[0]]["step"]) == 1
    ours.train(2)
    assert ours.step.replays == before + 2


def test_rates_that_a_hook_sets_stay() -> None:
    rates = []
    for captured in (True, False):
        training = Training(captured=captured)
        schedule = LambdaLR(training.optimizer, lambda step: 0.5**step)
        training.optimizer.register_step_post_hook(lambda *_, schedule=schedule: schedule.step())
        three_steps(training.optimizer, training.trained, training.buffers)
        rates.append([group["lr"] for group in training.optimizer.param_groups])
    assert rates[0] == rates[1] == [0.01 * 0.125, 0.03 * 0.125]


def test_a_group_without_parameters_and_an_unfused_state() -> None:
    trained = parameters()
    optimizer = AdamW([{"params": trained}, {"params": []}], fused=True)
    step = OptimizerStep(optimizer, lambda: Replay(optimizer))
    buffers = [torch.ones(3, 4) for _ in trained]
    three_steps(optimizer, trained, buffers)
    assert step.replays == 2
    unfused = AdamW([{"params": parameters()}, {"params": []}])
    optimizer.load_state_dict(unfused.state_dict())
    three_steps(optimizer, trained, buffers)
    assert (step.replays, step.note) == (2, "the step of AdamW is not that of torch's fused Adam or AdamW")


def test_settings_that_always_change_end_the_captures() -> None:
    def change(training: Training) -> None:
        for step in range(20):
            training.optimizer.param_groups[0]["weight_decay"] = 0.01 * step
            training.train(1)

    ours = both(change)
    assert ours.step.note == "gradients or settings changed after each of 8 captures"


def test_hooks_and_scaled_gradients_step_eagerly() -> None:
    ours = Training(captured=True)
    ours.train(3)
    seen: list[Any] = []
    handle = ours.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    ours.train(2)
    assert (len(seen), ours.step.replays) == (2, 2)
    handle.remove()
    ours.optimizer.found_inf = torch.ones(())  # as GradScaler sets it; the step is skipped
    before = [value.clone() for value in ours.values()]
    ours.train(1)
    torch.testing.assert_close(ours.values(), before, rtol=0, atol=0)
    del ours.optimizer.found_inf
    ours.train(1)
    assert ours.step.replays == 3


def test_the_reason_of_an_observed_step_is_not_that_of_later_ones() -> None:
    ours = Training(captured=True)
    handle = ours.optimizer.register_step_post_hook(lambda *_: None)
    ours.train(1)
    assert ours.step.note == "a hook hears the optimizer's step, or its gradients are scaled"
    handle.remove()
    ours.train(1)
    assert (ours.step.replays, ours.step.note) == (0, None)


def test_release_restores_the_step() -> None:
    ours, stock = Training(captured=True), optimizer_of(parameters())
    ours.step.release()
    assert "step" not in vars(ours.optimizer)
    assert ours.optimizer.step.__func__ is stock.step.__func__
    wrapped = Training(captured=True)
    schedule = LambdaLR(wrapped.optimizer, lambda _: 1.0)
    wrapped.step.release()  # the scheduler keeps it
    wrapped.train(3)
    schedule.step()
    assert wrapped.step.replays == 0
    before = Training(captured=False)
    before.train(3, rounded=False)
    torch.testing.assert_close(wrapped.values(), before.values(), rtol=0, atol=0)


def test_nothing_is_captured_while_it_waits_or_after_a_capture_failed() -> None:
    class Fails(CannotRecord):
        def record(self, run: Callable[[], Any]) -> Any:
            attempts.append(waiting)
            return super().record(run)

    attempts, trained, waiting = list[bool](), parameters(), True
    optimizer, gradients = optimizer_of(trained), [torch.ones(3, 4) for _ in trained]
    OptimizerStep(optimizer, Fails, lambda: waiting)
    three_steps(optimizer, trained, gradients)
    assert not attempts
    waiting = False
    for _ in range(2):
        three_steps(optimizer, trained, gradients)
    assert len(attempts) == 1


def test_a_failed_capture_leaves_the_optimizer_as_it_was() -> None:
    trained = parameters()
    optimizer = optimizer_of(trained)
    step = OptimizerStep(optimizer, CannotRecord)
    three_steps(optimizer, trained, [torch.ones(3, 4) for _ in trained])
    assert (step.replays, step.note) == (0, "it cannot be captured (operation not permitted when stream is capturing)")
    assert [(group["lr"], group["capturable"]) for group in optimizer.param_groups] == [(0.01, False), (0.03, False)]
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())


def test_what_cannot_be_replayed_is_said() -> None:
    trained = parameters()
    assert cannot_replay(AdamW(trained, fused=True)) is None
    assert cannot_replay(SGD(trained, fused=True)) == "the step of SGD is not that of torch's fused Adam or AdamW"
    assert cannot_replay(AdamW(trained)) == "the step of AdamW is not that of torch's fused Adam or AdamW"
    rate = torch.tensor(0.1)
    assert cannot_replay(AdamW(trained, lr=rate, fused=True)) == "the learning rate is a tensor"
