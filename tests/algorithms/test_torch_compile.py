"""torch_compile: parity, counted graphs and recompilations, and errors if nothing is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer_speedups import CUDAGraphs, TorchCompile, Unpadding, apply
from composer_speedups.core.engaging import check
from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run
from tests.helpers.common import (
    awkward_batches,
    fit_and_close,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.models import tiny_model


@pytest.mark.parametrize(
    "backend",
    others_exhaustive(
        sorted({*torch._dynamo.list_backends(), "eager", "aot_eager"} - {"inductor"}), lambda name: name != "aot_eager"
    ),
)
@pytest.mark.pins
def test_every_public_backend_trains_or_is_refused_with_a_reason(backend: str) -> None:
    technique, model = TorchCompile(backend=backend), tiny_bert()
    model.config.problem_type = "single_label_classification"  # otherwise set in the first forward pass
    lacks = list(technique.needs(Run(torch.device("cpu"))))
    if lacks:
        assert "pip install" in lacks[0].fix or "CUDA GPU" in lacks[0].reason
        with pytest.raises(Refusal, match="torch_compile: "):
            make_trainer([technique], model=model)
        return
    trained([technique], model=model, batches=plain_batches(2))
    assert technique.evidence["graphs"] >= 1
    assert technique.evidence["graph_breaks"] == technique.evidence["recompiles"] == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # a subgraph without kernels
@pytest.mark.parametrize("arguments", [{"backend": "cudagraphs"}, {"mode": "reduce-overhead"}])
def test_modes_that_capture_graphs_train_on_a_gpu(arguments: Any) -> None:
    technique = TorchCompile(**arguments)
    assert technique.fixed_shapes
    trained([technique], batches=plain_batches(4), gpu=True)
    assert technique.evidence["graphs"] >= 1


def test_blocks_share_one_graph_and_a_new_shape_counts_as_a_recompile() -> None:
    technique = TorchCompile(scope="blocks", backend="aot_eager")
    trained([technique], batches=plain_batches(3))
    assert (technique.evidence["modules"], technique.evidence["graphs"]) == (2, 1)
    assert technique.evidence["recompiles"] == 0
    torch._dynamo.reset()
    technique = TorchCompile(scope="blocks", backend="aot_eager", dynamic=False)
    trained([technique], batches=awkward_batches()[:2])
    assert technique.evidence["graphs"] == 2
    assert technique.evidence["recompiles"] == 1


@pytest.mark.exhaustive
def test_counts_are_right_after_many_compilations() -> None:
    """torch keeps the metrics of its last 64 compilations."""
    for _ in range(65):
        torch.compile(lambda x: x + 1, backend="eager", dynamic=False)(torch.ones(2))
    technique = TorchCompile(scope="blocks", backend="aot_eager", dynamic=False)
    trained([technique], batches=awkward_batches()[:2])
    assert (technique.evidence["graphs"], technique.evidence["recompiles"]) == (2, 1)
    assert technique.evidence["compile_seconds"] > 0


@pytest.mark.exhaustive
def test_graph_breaks_are_counted() -> None:
    model = tiny_model("bert", layers=1)
    inner = model.bert.pooler

    class Printing(nn.Module):
        def forward(self, hidden: Any) -> Any:
            torch._dynamo.graph_break()
            return inner(hidden)

    model.bert.pooler = Printing()
    technique = TorchCompile(backend="eager")
    trained([technique], model=model, batches=plain_batches(1))
    assert technique.evidence["graph_breaks"] >= 1


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_run_without_a_compiled_graph_is_detected(compiled_before: bool) -> None:
    """Not in pins: after running with dynamo disabled, torch 2.7 would not compile the same code later."""
    if compiled_before:  # an earlier run of the process leaves compiled code
        trained([TorchCompile("blocks", backend="eager")])
    trainer = make_trainer([TorchCompile("blocks", backend="eager")])
    said = r"without a compiled graph: torch\._dynamo\.config\.disable is set; unset torch\._dynamo\.config\.disable"
    with torch._dynamo.config.patch(disable=True), pytest.raises(Refusal, match=said):
        fit_and_close(trainer)


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
@pytest.mark.pins
def test_disabled_compilation_is_refused_before_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(Refusal, match=f"torch_compile: {name} is set, which disables torch.compile; unset it"):
        make_trainer([TorchCompile(backend="aot_eager")])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(Refusal, match="torch has no backend 'fastest'; use one of"):
        make_trainer([TorchCompile(backend="fastest")])
    with pytest.raises(Refusal, match="no ModuleList with blocks of one class, which scope: blocks compiles"):
        apply(nn.Sequential(nn.Linear(2, 2)), [TorchCompile("blocks", "eager")])
    model = tiny_bert()
    model.compile(backend="eager")
    with pytest.raises(Refusal, match="the model is already compiled by other code"):
        apply(model, [TorchCompile(backend="eager")])


def test_settings_that_conflict_with_other_techniques_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a simulated GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpu = Run(torch.device("cuda"), "amp_bf16")
    with pytest.raises(Refusal, match=r"torch_compile: conflicts with cuda_graphs: with this mode or backend"):
        check([CUDAGraphs(), TorchCompile(mode="reduce-overhead")], gpu)
    for settings in ({"dynamic": False}, {"mode": "reduce-overhead"}):
        with pytest.raises(Refusal, match=r"torch_compile: conflicts with unpadding: .* remove torch_compile or unpad"):
            check([Unpadding(), TorchCompile(**settings)], gpu)  # type: ignore[arg-type]
    check([CUDAGraphs(), Unpadding(), TorchCompile()], gpu)


def test_blocks_that_cannot_share_code_because_of_hooks_are_refused() -> None:
    model = tiny_bert()
    layers = model.bert.encoder.layer
    handle = layers[1].intermediate.register_forward_hook(lambda _m, _i, output: 2 * output)
    with pytest.raises(Refusal, match=r"different hooks on modules inside them.*use scope: model"):
        apply(model, [TorchCompile("blocks", "eager")])
    assert all(layer._compiled_call_impl is None for layer in layers)
    handle.remove()
    layers[1].register_forward_hook(lambda *_: None)  # runs outside of the shared code
    apply(model, [TorchCompile("blocks", "eager")])
