"""Reading the loss early: the numbers equal Composer's, also on two ranks; only its loop's calls are intercepted."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from composer import Trainer
from composer.algorithms import SAM
from composer.core import Callback, DataSpec, Event, State
from composer.devices import DeviceCPU, DeviceGPU
from composer.loggers import InMemoryLogger, Logger
from composer.models import HuggingFaceModel
from composer.trainer import trainer as composer_trainer
from composer.trainer._scaler import ClosureGradScaler
from composer.utils import dist, ensure_tuple
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassConfusionMatrix

from composer_speedups import (
    CUDAGraphs,
    EarlyLoss,
    FusedLayers,
    FusedOptimizer,
    LeanDispatch,
    MixedPrecision,
    Unpadding,
    apply,
)
from composer_speedups.algorithms.lean_dispatch.modules import LeanEvents
from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run
from composer_speedups.core.trainer_state import host_group, max_over_ranks
from composer_speedups.distributed import composer_loop, host_scalars
from composer_speedups.train.config.schema import TrainerConfig
from composer_speedups.train.trainer import open_device
from tests.helpers.common import (
    Batches,
    Recorder,
    final_weights,
    fit_and_close,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.rerun import graphed
from tests.reference.tolerance import assert_near


class Watched:
    """In place of copies of a GPU: logs when values were sent and received."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.error = 0.0

    def copy(self, value: Tensor) -> SimpleNamespace:
        assert type(value) is Tensor
        self.done.append("sent")
        sent = float(value)

        def receive() -> float:
            self.done.append("received")
            return sent + self.error

        return SimpleNamespace(receive=receive)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Let the technique run on a CPU, with watched copies."""
    watched = Watched()
    monkeypatch.setattr(EarlyLoss, "needs", lambda *_: ())
    monkeypatch.setattr(host_scalars, "HostCopy", watched.copy)
    monkeypatch.setattr(host_scalars, "is_busy", lambda device: True)
    return watched


class Losses(HuggingFaceModel):
    """A model that returns its loss as a tensor, tuple or dict, or as one of several, according to ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__(tiny_bert(), use_logits=True)
        self.kind, self.calls = kind, 0

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        loss, self.calls = super().loss(outputs, batch), self.calls + 1
        if self.kind == "tuple":
            return loss / 3, loss * 2 / 3
        if self.kind == "dict" or (self.kind == "mixed" and self.calls % 3 == 0):
            return {"total": loss, "half": loss / 2}
        return loss


def train(kind: str, rows: int, algorithms: Any = ()) -> tuple[Trainer, dict[str, list[float]]]:
    """Train four batches per rank; return the Trainer and the losses and times that it logged."""
    memory, batches = InMemoryLogger(), Batches(plain_batches(4 * dist.get_world_size()))
    loader = DataLoader(batches, batch_size=None, sampler=dist.get_sampler(batches))
    trainer = trained(
        algorithms,
        model=Losses(kind),
        train_dataloader=DataSpec(loader, get_num_samples_in_batch=lambda b: len(b["labels"])),
        device_train_microbatch_size=rows,
        loggers=[memory],
    )
    names = [name for name in memory.data if name.startswith(("loss/", "time/"))]
    return trainer, {name: [value for _, value in memory.data[name]] for name in names}


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "mixed"])
@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.pins
def test_logs_and_weights_equal_composers(kind: str, rows: int, copies: Watched) -> None:
    technique = EarlyLoss()
    trainer, logged = train(kind, rows, [technique])
    stock, expected = train(kind, rows)
    assert logged == expected
    assert len(logged["loss/train/total"]) == 4
    torch.testing.assert_close(final_weights(trainer), final_weights(stock), rtol=0, atol=0)
    reads = {"tensor": 4, "tuple": 12, "dict": 8}.get(kind)
    if reads is not None:
        assert technique.evidence == {"losses_read": reads, "read_before_the_batch_was_over": reads}
    assert "tensor_to_device" not in vars(trainer.state.device), "restored"


class Heard(Callback):
    """Each event of training, with what it finds in the state."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if not event.value.startswith(("init", "fit", "after_load", "before_load")):
            losses = [loss.tolist() for loss in ensure_tuple(state.loss)]
            rows = len(state.batch["labels"]) if isinstance(state.batch, dict) else None
            confusion = state.train_metrics["MulticlassConfusionMatrix"].confmat.tolist() if state.train_metrics else []
            self.heard.append((event.value, losses, rows, confusion))


@pytest.mark.parametrize("kind", ["tensor", "dict"])
@pytest.mark.parametrize("case", ["metrics", "tokens", "scaled"])
def test_each_event_finds_what_it_finds_in_composers_own_loop(
    case: str, kind: str, copies: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With metrics of training batches, micro-batches weighted by tokens, and a scaled loss."""
    runs = []
    if case == "scaled":
        monkeypatch.setattr(Trainer, "_use_grad_scaling", lambda *_: True)
        monkeypatch.setattr(Trainer, "_use_closures", lambda _: False)
    for algorithms in ([], [EarlyLoss()], [EarlyLoss(), LeanDispatch()]):
        heard, memory, model = Heard(), InMemoryLogger(), Losses(kind)
        model.train_metrics = {"MulticlassConfusionMatrix": MulticlassConfusionMatrix(2)} if case == "metrics" else None
        spec = DataSpec(
            DataLoader(Batches(plain_batches(4)), batch_size=None),
            get_num_samples_in_batch=lambda b: len(b["labels"]),
            get_num_tokens_in_batch=lambda b: int(b["attention_mask"].sum()),
        )
        trainer = make_trainer(
            algorithms, model=model, train_dataloader=spec, device_train_microbatch_size=3, loggers=[memory],
            callbacks=[heard], accumulate_train_batch_on_tokens=case == "tokens",
        )  # fmt: skip
        trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # type: ignore[assignment]
        fit_and_close(trainer)
        runs.append((heard.heard, memory.data["loss/train/total"], final_weights(trainer)))
    for events, losses, weights in runs[1:]:
        assert events == runs[0][0]
        assert [value for _, value in losses] == [value for _, value in runs[0][1]]
        torch.testing.assert_close(weights, runs[0][2], rtol=0, atol=0)
    assert len(runs[0][1]) == 4


class Hooked(Callback):
    """Doubles the gradient of each loss, or keeps it."""

    def __init__(self, kind: str) -> None:
        self.kind, self.kept = kind, 0.0

    def before_backward(self, state: State, logger: Logger) -> None:
        loss: Any = state.loss
        if self.kind == "doubled":
            loss.register_hook(lambda gradient: gradient * 2)
        elif self.kind == "doubled in place":
            loss.register_hook(lambda gradient: gradient.mul_(2))
        elif self.kind == "kept":
            loss.retain_grad()

    def after_backward(self, state: State, logger: Logger) -> None:
        self.kept += float(state.loss.grad or 0)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("kind", ["plain", "doubled", "doubled in place", "kept"])
@pytest.mark.parametrize("rows", [4, 3])
def test_replayed_passes_have_composers_gradients(
    kind: str, rows: int, copies: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a loss without hooks run without autograd."""
    runs, backward, differentiated = [], Tensor.backward, list[Tensor]()

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> None:
        differentiated.append(self)
        backward(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "backward", noted)
    for algorithms in ([], [EarlyLoss()]):
        recorder, hooked, model = Recorder(), Hooked(kind), Losses("tensor")
        loader = DataLoader(Batches(plain_batches(4)), batch_size=None)
        trainer = make_trainer(
            algorithms, model=model, callbacks=[recorder, hooked], device_train_microbatch_size=rows,
            train_dataloader=DataSpec(loader, get_num_samples_in_batch=lambda b: len(b["labels"])),
        )  # fmt: skip
        if algorithms:
            differentiated.clear()
            calls = graphed(model, max_graphs=2, accumulate=True)
            model.loss = lambda outputs, batch: outputs["loss"]  # type: ignore
        fit_and_close(trainer)
        runs.append((recorder.losses, recorder.first_gradients, final_weights(trainer), hooked.kept))
    assert_near(runs[1], runs[0])
    assert calls.replays == {4: 4, 3: 8}[rows]
    assert len(differentiated) == (0 if kind == "plain" else calls.replays)


class Peculiar(Losses, Callback):
    """A model and callback with one of the cases below."""

    def __init__(self, case: str) -> None:
        super().__init__("tensor")
        self.case = case

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().loss(outputs, batch)
        if self.case == "several values":
            return {"total": torch.stack([loss, loss])}
        if self.case == "cancelled":  # in float32, the sum over a batch is hardly more than rounding errors
            return loss - loss.detach() + (1000.1, -1000.3, 0.2, 1e-4)[self.calls % 4]
        return loss * float("nan") if self.case == "nan" else loss

    def after_backward(self, state: State, logger: Logger) -> None:
        if self.case == "loss changed in place":  # as an all-reduce does
            state.loss.detach().mul_(2)  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ["cancelled", "nan", "loss changed in place", "sam with a scaled loss"])
@pytest.mark.filterwarnings("ignore:SAM has known issues", "ignore:Detected call of `lr_scheduler.step")
def test_peculiar_losses_are_trained_as_in_composer(
    case: str, copies: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    algorithms: list[Any] = []
    if case.startswith("sam"):  # whose closures return the loss as a tensor, and which asks whether it is 0
        monkeypatch.setattr(Trainer, "_use_grad_scaling", lambda *_: True)
        algorithms = [SAM()]
    for technique in ([], [EarlyLoss()]):
        model, memory = Peculiar(case), InMemoryLogger()
        loader = DataLoader(Batches(plain_batches(4)), batch_size=None)
        trainer = make_trainer(
            [*technique, *algorithms], model=model, callbacks=[model], device_train_microbatch_size=1, loggers=[memory],
            train_dataloader=DataSpec(loader, get_num_samples_in_batch=lambda b: len(b["labels"])),
        )  # fmt: skip
        trainer.state.scaler = ClosureGradScaler("cpu", init_scale=4.0)  # type: ignore[assignment, arg-type]
        fit_and_close(trainer)
        runs.append(([value for _, value in memory.data["loss/train/total"]], final_weights(trainer)))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0, equal_nan=True)
    assert len(runs[0][0]) == 4


def test_a_total_with_several_values_is_an_error(copies: Watched) -> None:
    for technique in ([], [EarlyLoss()]):
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            trained(technique, model=Peculiar("several values"))


def test_a_loss_of_a_batch_is_its_sum_in_any_operation(copies: Watched) -> None:
    interception = host_scalars.Interception(DeviceCPU())
    loss = torch.zeros(1).as_subclass(host_scalars._BatchLoss)
    loss.readback, loss.parts, loss.value = interception.readback, [], None
    assert not loss
    loss += torch.tensor(2.0)
    assert loss
    loss += torch.tensor(1.5)
    assert torch.add(loss, 1).tolist() == [4.5]
    assert loss.zero_().tolist() == [0]


def test_composer_has_its_own_way_with_automatic_microbatches(copies: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they are set for a later call of fit: their ranks agree in every pass."""
    original: Any = Trainer._train_microbatch
    calls: list[int] = []
    trainer = make_trainer([EarlyLoss()], batches=plain_batches(2))
    trainer.fit()

    def noted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(Trainer, "_train_microbatch", noted)
    trainer.fit(duration="1ba")
    assert not calls
    trainer.state.auto_microbatching = True
    trainer.fit(duration="1ba")
    trainer.close()
    assert calls == [1]


class OnGPU(Tensor):
    """A scalar that seems to be on a GPU."""

    number: int
    device = property(lambda self: torch.device("cuda", self.number))  # type: ignore[assignment]


def test_gpus_do_not_share_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event stays on the GPU of the stream on which it is recorded first."""

    class Event:
        device: Any = None

        def record(self, stream: Any) -> None:
            assert self.device in (None, stream)
            self.device = stream

        def synchronize(self) -> None:
            assert self.device is not None

    empty = torch.empty
    monkeypatch.setattr(host_scalars, "_free", defaultdict(list))
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory: empty(*size))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    for number in (0, 1, 0, 1):
        value = torch.tensor([2.5 + number]).as_subclass(OnGPU)
        value.number = number
        assert host_scalars.HostCopy(value).receive() == 2.5 + number
    assert [len(free) for free in host_scalars._free.values()] == [1, 1]


def test_losses_are_sent_before_the_backward_pass(copies: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Tensor.backward

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> None:
        copies.done.append("backward")
        backward(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "backward", noted)
    train("tensor", 2, [EarlyLoss()])
    assert copies.done[:6] == ["sent", "backward"] * 2 + ["received"] * 2
    copies.done.clear()
    train("dict", 4, [EarlyLoss()])
    assert copies.done[:5] == ["sent", "sent", "backward", "received", "received"]


def test_other_callers_are_not_intercepted(copies: Watched) -> None:
    device = DeviceCPU()
    interception = host_scalars.Interception(device)
    interception.install()
    for tensor in (torch.zeros(1), torch.tensor(3), torch.zeros(2)):
        assert type(device.tensor_to_device(tensor)) is Tensor
    moved: Any = device.batch_to_device({"a": torch.zeros(1)})
    assert type(moved["a"]) is Tensor
    interception.undo()
    interception.undo()
    assert device.tensor_to_device.__func__ is DeviceCPU.tensor_to_device  # type: ignore[attr-defined]


def test_scalars_of_composers_loop_are_not_sent_to_the_device(copies: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    senders: set[str] = set()
    moved = DeviceCPU.tensor_to_device

    def noted(self: DeviceCPU, tensor: Tensor) -> Tensor:
        senders.update([sys._getframe(1).f_code.co_name, sys._getframe(2).f_code.co_name])
        return moved(self, tensor)

    monkeypatch.setattr(DeviceCPU, "tensor_to_device", noted)
    read = {"_train_batch", "_train_microbatches", "_train_microbatch", "_accumulate_time_across_ranks"}
    read.add("_iter_dataloader")
    train("tensor", 4)
    assert read <= senders
    senders.clear()
    train("tensor", 4, [EarlyLoss()])
    assert not read & senders
    train("tensor", 4, [LeanDispatch()])
    assert read - senders == {"_accumulate_time_across_ranks"}
    another = LeanEvents(cast(State, SimpleNamespace()))  # of a Trainer that is open
    another.install()
    senders.clear()
    train("tensor", 4, [EarlyLoss()])
    another.uninstall()
    assert not read & senders


def test_a_loop_that_bypasses_the_interception_is_detected(copies: Watched) -> None:
    trainer = make_trainer([EarlyLoss()])
    trainer.state.device.tensor_to_device = DeviceCPU.tensor_to_device.__get__(trainer.state.device)  # type: ignore[method-assign]
    with pytest.raises(Refusal, match=r"early_loss: .*Composer read no loss through it"):
        fit_and_close(trainer)


def test_a_wrong_number_is_detected(copies: Watched) -> None:
    copies.error = 1.0
    with pytest.raises(Refusal, match=r"early_loss: .*it read .*, and the GPU has"):
        trained([EarlyLoss()])


@pytest.mark.pins
def test_it_is_refused_in_another_loop() -> None:
    with pytest.raises(Refusal, match="needs Composer's Trainer, and this is another loop"):
        apply(tiny_bert(), [EarlyLoss()])


def test_another_training_loop_is_refused(copies: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(composer_loop, "version", lambda _: "0.33.0")
        with pytest.raises(Refusal, match=r"composer 0\.32\.1, and this is 0\.33\.0"):
            make_trainer([EarlyLoss()])
    original = Trainer._train_batch

    @functools.wraps(original)
    def replacing(self: Trainer, *args: Any) -> Any:
        return original(self, *args)

    monkeypatch.setattr(Trainer, "_train_batch", replacing)
    with pytest.raises(Refusal, match=r"early_loss: .*other code has replaced Trainer\._train_batch"):
        make_trainer([EarlyLoss()])


# Ranks


def _train_both() -> dict[str, Any]:
    """Train with and without the technique; return this rank's logs and weights, and the number of losses read.
    Another Trainer is open, whose ``lean_dispatch`` has replaced a function that ``early_loss`` recognizes."""
    LeanEvents(cast(State, SimpleNamespace())).install()
    EarlyLoss.needs = lambda *_: ()  # type: ignore[method-assign, assignment, return-value]  # on the CPU
    technique, runs = EarlyLoss(), {}
    for name, algorithms in (("early", [technique, LeanDispatch()]), ("stock", [])):
        trainer, logged = train("dict", 3, algorithms)
        runs[name] = {name: values for name, values in logged.items() if "wct" not in name}, final_weights(trainer)
    return {**runs, "read": technique.evidence["losses_read"]}


def _refuse_host_tensors() -> None:
    """Make the default group refuse host tensors, as NCCL does."""
    config = torch.distributed.get_backend_config
    torch.distributed.get_backend_config = lambda group=None: "cuda:nccl" if group is None else config(group)

    def refusing(original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is None and not getattr(args[0], "on_device", False):
                raise RuntimeError("No backend type associated with device type cpu")
            return original(*args, **kwargs)

        return collective

    for name in ("all_reduce", "broadcast"):
        setattr(torch.distributed, name, refusing(getattr(torch.distributed, name)))
    move = DeviceCPU.tensor_to_device

    def moved(self: DeviceCPU, tensor: Any) -> Any:
        tensor = move(self, tensor)
        tensor.on_device = True
        return tensor

    DeviceCPU.tensor_to_device = moved  # type: ignore[method-assign]


def _both_without_host_group() -> dict[str, Any]:
    _refuse_host_tensors()
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    outcome = _train_both()
    assert len(torch.distributed.distributed_c10d._world.pg_map) == before
    assert host_group() is None
    assert composer_trainer.dist is dist
    assert max_over_ranks(DeviceCPU(), dist.get_global_rank()) == dist.get_world_size() - 1
    return outcome


@pytest.mark.parametrize(
    ("train_both", "world"),
    [(_train_both, 2), (_both_without_host_group, 2), (_both_without_host_group, 1)],
    ids=["gloo", "nccl only", "nccl on one rank"],
)
def test_ranks_log_the_same_losses_and_weights_as_composer(train_both: Any, world: int) -> None:
    """With NCCL only, they open and close a gloo group; one rank has it with FSDP."""
    ranks = on_ranks(train_both, world)
    for outcome in ranks:
        (logged, weights), (expected, reference) = outcome["early"], outcome["stock"]
        assert logged == expected
        assert len(logged["loss/train/total"]) == 4
        torch.testing.assert_close(weights, reference, rtol=0, atol=0)
        assert outcome["read"] == 8
    assert ranks[0]["early"][0] == ranks[-1]["early"][0], "losses are averaged over both ranks"


@pytest.mark.parametrize(
    ("world", "interface", "backend"), [(2, None, True), (4, None, False), (4, "eth0", True)], ids=str
)
def test_gloo_is_added_on_one_node_or_with_a_known_interface(
    world: int, interface: str | None, backend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(DeviceGPU, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_local_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    device = open_device(TrainerConfig())
    assert device.dist_backend == ("cpu:gloo,cuda:nccl" if backend else "nccl")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # torch warns once per process
def test_a_steady_batch_of_the_fast_set_synchronizes_only_for_the_loss() -> None:
    """torch's sync debug mode raises on every other synchronization, in the whole of Composer's loop."""

    class Strict(EarlyLoss):
        def before_forward(self, run: Run) -> None:
            batch = run.state.timestamp.batch.value if run.state is not None else 0
            torch.cuda.set_sync_debug_mode("error" if batch in range(4, 8) else "default")

    technique = Strict()
    algorithms = [technique, MixedPrecision(), Unpadding(512), FusedLayers(), FusedOptimizer(), CUDAGraphs()]
    one = plain_batches(1)[0]
    trainer = make_trainer(algorithms, batches=[one] * 9, model=tiny_bert(dropout=0.1), gpu=True)
    try:
        trainer.fit()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.close()
    assert technique.evidence["losses_read"] == 9


@pytest.mark.gpu
def test_on_a_gpu_losses_equal_composers_and_arrive_early() -> None:
    runs = []
    for algorithms in ([], [technique := EarlyLoss()]):
        memory = InMemoryLogger()
        trainer = make_trainer(algorithms, batches=plain_batches(8), loggers=[memory], gpu=True)
        if algorithms:  # slow down the backward pass
            trainer.state.model.model.classifier.weight.register_hook(lambda _: torch.cuda._sleep(100_000_000))
        fit_and_close(trainer)
        runs.append(([value for _, value in memory.data["loss/train/total"]], final_weights(trainer)))
    assert runs[1][0] == runs[0][0]
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=0, atol=0)
    assert technique.evidence["losses_read"] == 8
    assert technique.evidence["read_before_the_batch_was_over"] >= 6
