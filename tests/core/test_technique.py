"""The contract: settings, misuse, order, all or none, the observed batch, and what a technique without effect does."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from pydantic import Field
from torch import nn

from composer_speedups import (
    CUDAGraphs,
    ForEachOptimizer,
    FusedLayers,
    FusedOptimizer,
    MixedPrecision,
    SDPAAttention,
    Unpadding,
    apply,
    recommended,
)
from composer_speedups.algorithms.cuda_graphs import graphed_calls
from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.core.engaging import check
from composer_speedups.core.errors import ConfigError, Refusal
from composer_speedups.core.host import host_of
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.settings import Check
from composer_speedups.core.technique import NOT_YET, Order, Technique
from tests.helpers.common import SAVING, final_weights, fit_and_close, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.rerun import CannotRecord


class Toy(Technique):
    name = "toy"
    order = Order.FLAGS
    effect = "exact"

    count: int = Field(4, ge=1, le=8)
    """How many."""
    share: float = Field(0.5, gt=0, lt=1)
    """How much."""
    kind: Literal[8, "fp8"] | None = Field(None)
    """Which."""
    names: list[str] | None = Field(None)
    """Whose."""

    def checks(self) -> Iterator[Check]:
        yield self.kind == 8 and self.count == 8, "count", "8 and kind=8 cannot go together"

    def reset(self) -> None:
        super().reset()
        self.calls: list[str] = []

    def engage(self, run: Run) -> dict[str, Any]:
        run.give_back(self.calls.append, "undone")
        return {}

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        self.calls.append("proof")
        return {}

    def summary(self, run: Run) -> Mapping[str, Any]:
        self.calls.append("summary")
        return {}

    def batch_end(self, run: Run) -> None:
        self.calls.append("batch_end")

    def fit_end(self, run: Run) -> None:
        self.calls.append("fit_end")


def test_the_constructor_follows_the_declared_settings() -> None:
    toy = Toy(2, names=["a"], on_unavailable="warn")
    assert (toy.count, toy.share, toy.names, toy.on_unavailable) == (2, 0.5, ["a"], "warn")
    assert repr(toy) == str(toy) == "Toy(count=2, share=0.5, kind=None, names=['a'])"
    assert repr(eval(repr(toy))) == repr(toy)
    with pytest.raises(TypeError):
        Toy(2, 0.5, None, None, "warn")  # type: ignore[misc]
    assert Toy(names="ab").names == ["ab"]  # type: ignore[arg-type]
    assert toy != Toy(count=2, names=["a"])
    assert len({toy, Toy(), toy}) == 2, "compared and hashed by identity"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": True}, "count must not be true or false"),
        ({"count": 1.0}, "count must be an integer, not 1.0"),
        ({"share": math.nan}, "share must be a finite number, not nan"),
        ({"share": "0.5"}, "share must be a number, not '0.5'"),
        ({"kind": True}, "kind must be 8 or 'fp8' or null, not True"),
        ({"count": 8, "kind": 8}, "count 8 and kind=8 cannot go together"),
        ({"count": 0, "share": 0}, "count must be .* equal to 1, not 0\nshare must be greater than 0, not 0"),
    ],
)
def test_an_invalid_setting_of_a_technique_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    lines = "\n".join(f"Toy: {line}" for line in message.split("\n"))
    with pytest.raises(ValueError, match=f"^{lines}$"):
        Toy(**settings)


def test_misuse_is_one_clear_line() -> None:
    toy = Toy()
    apply(tiny_bert(), toy)  # type: ignore[arg-type]  # as Composer accepts it
    assert toy.engaged
    wrong: list[list[Any]] = [[Toy], [Toy(), Toy], [Toy(), [Toy()]], [Toy(), "toy"], [Toy(), recommended]]
    for algorithms in wrong:
        with pytest.raises(ConfigError, match=r"^algorithms: .* is no technique; write instances in one list, as in "):
            trained(algorithms=algorithms)
    with pytest.raises(ConfigError, match="is no technique"):
        apply(tiny_bert(), [[Toy()]])  # type: ignore[list-item]
    with pytest.raises(Refusal, match=r"^apply: the model is a str, not a torch\.nn\.Module"):
        apply("bert", [])  # type: ignore[arg-type]
    with pytest.raises(Refusal, match=r"DataParallel is not supported; use DistributedDataParallel$"):
        apply(nn.DataParallel(tiny_bert()), [Toy()])


def test_events_proof_and_summary_come_in_this_order_and_before_the_callbacks() -> None:
    class Seen(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            seen.append(len(toy.calls))

    toy, seen = Toy(), list[int]()
    trainer = make_trainer([toy], batches=plain_batches(3), callbacks=[Seen()])
    trainer.fit()
    assert seen == [2, 3, 4]
    assert toy.calls == ["batch_end", "proof", "batch_end", "batch_end", "summary", "fit_end"]
    trainer.fit(duration="1ba")
    assert toy.calls[6:] == ["batch_end", "summary", "fit_end"]
    trainer.close()
    assert toy.calls[9:] == ["undone"]


def test_techniques_engage_in_the_stated_order_and_are_undone_in_reverse_even_if_one_raises() -> None:
    calls: list[str] = []

    class One(Toy):
        def engage(self, run: Run) -> dict[str, Any]:
            calls.append(self.name)
            run.give_back(self.undo)
            return {}

        def undo(self) -> None:
            calls.append(f"undo {self.name}")
            if self.name == "b":
                raise RuntimeError("cannot undo")

    def build(kind: str, order: Order) -> Technique:
        return type(kind, (One,), {"name": kind, "order": order})()  # type: ignore[no-any-return]

    trainer = make_trainer([build("c", Order.COMPILE), build("a", Order.FLAGS), build("b", Order.LAYERS)])
    assert calls == ["a", "b", "c"]
    host = host_of(trainer.state)
    with pytest.raises(RuntimeError, match="cannot undo"):
        host.close(trainer.state, trainer.logger)
    assert calls[3:] == ["undo c", "undo b", "undo a"]
    trainer.close()


class Refused(Toy):
    name = "refused"
    order = Order.COMPILE

    def engage(self, run: Run) -> dict[str, Any]:
        raise self.refusal("the model has none", "remove it")


def test_a_refusal_undoes_the_techniques_before_it() -> None:
    toy = Toy()
    with pytest.raises(Refusal, match=r"^refused: the model has none; remove it"):
        make_trainer([Refused(), toy])
    assert toy.calls == ["undone"]


def test_a_technique_that_fails_half_way_is_undone_before_the_run_continues_without_it() -> None:
    class HalfWay(Toy):
        name = "half_way"

        def engage(self, run: Run) -> dict[str, Any]:
            super().engage(run)
            raise ValueError("it has no weights")

    half_way, toy = HalfWay(on_unavailable="warn"), Toy()
    with pytest.warns(UserWarning, match="continuing without half_way: it has no weights"):
        trainer = make_trainer([half_way, toy])
    assert half_way.evidence == {"unavailable": "it has no weights", "fix": "remove it for this model"}
    assert (half_way.calls, toy.calls) == (["undone"], [])
    trainer.close()
    assert (half_way.calls, toy.calls) == (["undone"], ["undone"])


def test_warn_continues_without_a_technique_that_cannot_engage_and_rechecks_the_others() -> None:
    class Needs(Toy):
        name = "needs"
        order = Order.GRAPHS

        def needs(self, run: Run) -> Any:
            if "refused" not in run.techniques:
                yield self.refusal("refused must engage", "add it")

    refused, toy = Refused(on_unavailable="warn"), Toy()
    with pytest.warns(UserWarning, match=r"continuing without refused: the model has none .to silence this: remove it"):
        trained([refused, toy], batches=plain_batches(1))
    assert refused.engaged is False
    assert refused.evidence == {"unavailable": "the model has none", "fix": "remove it"}
    assert refused.calls == []
    assert toy.engaged is True
    with pytest.warns(UserWarning, match="without refused"), pytest.raises(Refusal, match=r"^needs: refused must"):
        make_trainer([Refused(on_unavailable="warn"), Needs()])


class Late(Toy):
    """Proves its effect in the second observed batch at the earliest."""

    name = "late"

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        self.calls.append("ended" if seen.ended else "proof")
        return {"steps": seen.steps} if self.calls.count("proof") == self.count else NOT_YET


def test_not_yet_asks_again_after_the_next_batch_and_silence_is_no_effect() -> None:
    late = Late(count=2)
    trained([late], batches=plain_batches(3))
    assert [call for call in late.calls if call != "batch_end"] == ["proof", "proof", "summary", "fit_end", "undone"]
    silent = Late(count=8)
    with pytest.raises(Refusal, match=r"^late: was applied but did not take effect: nothing was seen of it in the"):
        trained([silent], batches=plain_batches(2))
    assert silent.calls.count("ended") == 1


class Vain(Toy):
    name = "vain"

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        raise self.no_effect("nothing happened", "remove it")


def test_a_technique_without_effect_stops_the_run_or_stays_in_force() -> None:
    with pytest.raises(Refusal, match=r"^vain: was applied but did not take effect: nothing happened; remove it$"):
        trained([Vain()])
    vain = Vain(on_unavailable="warn")
    with pytest.warns(UserWarning, match="continuing although vain: was applied but did not take effect"):
        trained([vain], batches=plain_batches(2))
    assert vain.engaged is False
    assert vain.evidence["applied"] == "had no effect, kept"
    assert vain.calls == ["batch_end", "batch_end", "fit_end", "undone"]


class Watching(Toy):
    """Keeps what was observed."""

    name = "watching"
    order = Order.GRAPHS

    def reset(self) -> None:
        super().reset()
        self.seen = FirstBatch()

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        self.seen = seen
        return {"batch": 0 if run.state is None else run.state.timestamp.batch.value}


def test_the_first_batch_whose_step_was_taken_is_observed() -> None:
    """Operators of the forward and backward pass and of the step, dtypes, and moved parameters."""
    watching = Watching()
    trainer = trained([MixedPrecision("bf16", allow_cpu=True), watching], batches=plain_batches(2))
    seen, parameters = watching.seen, len(list(trainer.state.model.parameters()))
    assert {"native_layer_norm", "native_layer_norm_backward", "addcdiv_", "embedding_dense_backward"} <= set(
        seen.operators
    )
    assert seen.operators["native_layer_norm"] == 5
    assert seen.matmul_dtypes == {"bfloat16"}
    assert "float32" in seen.outputs or "bfloat16" in seen.outputs
    assert seen.steps == 1
    assert 0 < seen.moved <= seen.trained == parameters

    class Skipping(Callback):
        def after_train_batch(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch.value == 0:
                for parameter in state.model.parameters():
                    parameter.grad = None

    trained([watching], batches=plain_batches(3), callbacks=[Skipping()])
    assert watching.evidence["batch"] == 2
    model = tiny_bert()
    trained([watching], model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), batches=plain_batches(1))
    assert (watching.seen.moved, watching.seen.steps) == (None, 1), "a rate of 0 moves nothing and proves nothing"


def test_a_batch_that_raises_leaves_no_observer_behind() -> None:
    bad = plain_batches(1)
    bad[0]["input_ids"] = bad[0]["input_ids"] + 10_000
    trainer = make_trainer([Toy()], batches=bad)
    with pytest.raises(IndexError):
        trainer.fit()
    assert torch._C._len_torch_dispatch_stack() == 1
    make_trainer([Toy()]).close()  # the next Trainer begins
    assert torch._C._len_torch_dispatch_stack() == 0
    trainer.close()


def test_a_changed_model_is_collected() -> None:
    model = tiny_bert()
    alive = weakref.ref(apply(model, [Toy()])._run)
    assert alive() is not None
    del model
    gc.collect()
    assert alive() is None


def test_a_technique_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(Refusal, match=r"^toy: is listed twice; list it once$"):
        check([Toy(), Toy()], Run(torch.device("cpu")))


def test_training_with_a_technique_that_does_nothing_is_bit_equal_to_training_without() -> None:
    """The observer, the host and the comparison change no number."""
    settings: dict[str, Any] = {"batches": plain_batches(3)}
    weights = [final_weights(trained(t, model=tiny_bert(dropout=0.1), **settings)) for t in ([], [Toy(), Watching()])]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_failed_capture_after_the_first_batch_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs on a CPU, with a capture that fails as on a GPU."""

    def install(model: Any, max_graphs: int) -> GraphedCalls:
        calls = GraphedCalls(model, model.forward, max_graphs, recorder=CannotRecord)
        calls.install("forward")
        return calls

    monkeypatch.setattr(CUDAGraphs, "needs", lambda *_: ())
    monkeypatch.setattr(graphed_calls, "install", install)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    with pytest.raises(Refusal, match=r"cuda_graphs: the step cannot be captured \(operation not permitted"):
        trained([CUDAGraphs()])


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict")  # Composer's, just before our error
@pytest.mark.pins
def test_a_run_resumes_with_the_techniques_of_its_checkpoint_only(tmp_path: Path) -> None:
    """The error names both lists. Weights alone are loaded with any techniques."""
    sets: dict[str, list[Any]] = {
        "FusedOptimizer(), SDPAAttention(backend='auto')": [FusedOptimizer, SDPAAttention],
        "ForEachOptimizer(), SDPAAttention(backend='auto')": [ForEachOptimizer, SDPAAttention],
        "FusedOptimizer(), SDPAAttention(backend='math')": [FusedOptimizer, lambda: SDPAAttention("math")],
        "FusedOptimizer()": [FusedOptimizer],
        # Composer does not pass the checkpoint's algorithms to techniques that are not among them
        repr([FusedLayers(), Unpadding()])[1:-1]: [Unpadding, FusedLayers],
        "": [],
    }
    for folder, saved in (("both", next(iter(sets))), ("plain", "")):
        path = str(tmp_path / folder)
        trained([build() for build in sets[saved]], save_folder=path, **SAVING)
        for current, kinds in sets.items():
            if current and current != saved:  # a run without techniques has no host
                lists = f"was written with techniques [{saved}] and this run has [{current}]"
                with pytest.raises(ConfigError, match=re.escape(lists)):
                    make_trainer([build() for build in kinds], load_path=f"{path}/ba2.pt")
    checkpoint = str(tmp_path / "both" / "ba2.pt")
    trainer = make_trainer([ForEachOptimizer()], load_path=checkpoint, load_weights_only=True)
    held = torch.load(checkpoint, weights_only=False)["state"]["model"]
    loaded = final_weights(trainer)
    torch.testing.assert_close(loaded, {name: held[name] for name in loaded}, rtol=0, atol=0)
    fit_and_close(trainer)
