"""LoRA: what is trained and what is not, where it goes in the optimizer, and what the run leaves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from composer_speedups import (
    ForEachOptimizer,
    FusedOptimizer,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    SDPAAttention,
    TorchCompile,
    apply_lora,
)
from composer_speedups.algorithms.lora import merged_state_dict, save_adapter
from composer_speedups.algorithms.lora.adapters import adapted_layers, trained_copies
from composer_speedups.algorithms.registry import build_techniques
from composer_speedups.errors import ConfigError, NotEngagedError, TechniqueError
from composer_speedups.models import FinetuneModel
from tests.common import awkward_batches, batch, final_weights, make_trainer, plain_batches, tiny_bert
from tests.jobs import run
from tests.reference.loop import eval_logits, gradients
from tests.reference.tolerance import assert_near

QUERIES_AND_VALUES = [f"bert.encoder.layer.{i}.attention.self.{n}" for i in (0, 1) for n in ("query", "value")]
TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def trained_bert() -> Any:
    """A tiny BERT with adapters and classifier of some size, as after training."""
    model = tiny_bert()
    apply_lora(model, rank=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


@pytest.mark.pins
def test_outputs_stay_and_gradients_reach_the_adapters_and_the_classifier_alone() -> None:
    reference, model = tiny_bert(), tiny_bert()
    assert apply_lora(model) == QUERIES_AND_VALUES
    assert apply_lora(model) == []
    assert type(model) is type(reference)
    batches = awkward_batches()
    assert_near(eval_logits(model, batches), eval_logits(reference, batches))
    for each in (reference, model):
        each(**batches[0]).loss.backward()
    expected, got = gradients(reference), gradients(model)
    assert_near(got["classifier.modules_to_save.default.weight"], expected["classifier.weight"])
    # The adapter's output is 2 · B A x, so dL/dB = 2 · (dL/dW) Aᵀ: the base weight's gradient is the reference's.
    name = QUERIES_AND_VALUES[0]
    a = dict(model.named_parameters())[f"{name}.lora_A.default.weight"]
    assert_near(got[f"{name}.lora_B.default.weight"], 2 * expected[f"{name}.weight"] @ a.T)
    assert all("lora_" in n or "modules_to_save" in n for n in got)
    assert len(got) == 2 * len(QUERIES_AND_VALUES) + 2


@pytest.mark.parametrize(
    ("model", "targets", "heads"),
    [
        (lambda: RobertaForSequenceClassification(RobertaConfig(**TINY)), {"query", "value"}, ["classifier"]),
        (lambda: ElectraForSequenceClassification(ElectraConfig(**TINY)), {"query", "value"}, ["classifier"]),
        (
            lambda: DistilBertForSequenceClassification(
                DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
            ),
            {"q_lin", "v_lin"},
            ["pre_classifier", "classifier"],
        ),
        (lambda: BertForMaskedLM(BertConfig(**TINY)), {"query", "value"}, []),
    ],
    ids=["roberta", "electra", "distilbert", "mlm"],
)
def test_every_family_has_its_projections_and_its_head(model: Any, targets: set[str], heads: list[str]) -> None:
    model = model()
    names = apply_lora(model)
    assert {name.split(".")[-1] for name in names} == targets
    assert list(trained_copies(model)) == heads
    everything = apply_lora(twin := type(model)(model.config), targets="all-linear")
    assert len(everything) > len(names)
    assert not any(name.startswith(tuple(heads) or "?") or name.endswith("decoder") for name in everything)
    assert list(trained_copies(twin)) == heads
    assert set(merged_state_dict(model)) == set(type(model)(model.config).state_dict())


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if "classifier" in n], "lr": 5e-3},
            {"params": [p for n, p in named.items() if "query" in n and p.ndim > 1], "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if "embeddings" in n]},
            {"params": [p for n, p in named.items() if "key" in n]},
        ],
        lr=1e-3,
    )


@pytest.mark.pins
def test_what_is_trained_enters_the_group_of_the_weight_it_stands_for() -> None:
    model = tiny_bert()
    optimizer = two_groups(model)
    groups = list(optimizer.param_groups)
    weight = model.classifier.weight
    optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(weight)}
    apply_lora(model, optimizer)
    for _ in range(2):
        assert all(new is old for new, old in zip(optimizer.param_groups, groups, strict=True))
        named = {p: n for n, p in model.named_parameters()}
        held = [sorted({named[p].split(".")[-4] for p in g["params"] if "lora" in named[p]}) for g in groups]
        assert held == [["value"], ["query"], [], []], "value weights had no group, and enter the first"
        assert [len(g["params"]) for g in groups] == [2 + 4, 4, 0, 0]
        assert groups[0]["lr"] == 5e-3
        assert groups[1]["weight_decay"] == 0.0
        apply_lora(model, optimizer)
    copied = model.classifier.modules_to_save["default"].weight
    assert list(optimizer.state) == [copied]
    assert optimizer.state[copied]["step"] == 3


def test_an_optimizer_with_names_keeps_them_right() -> None:
    model = tiny_bert()
    optimizer = torch.optim.AdamW(model.named_parameters())
    apply_lora(model, optimizer)
    (group,) = optimizer.param_groups
    named = dict(model.named_parameters())
    assert [named[n] for n in group["param_names"]] == group["params"]
    assert all(p.requires_grad for p in group["params"])
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("technique", [None, ForEachOptimizer, FusedOptimizer])
def test_groups_that_became_empty_do_no_harm(technique: Any) -> None:
    model = tiny_bert()
    composer_model = HuggingFaceModel(model, use_logits=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    lora = LoRA()
    trainer = make_trainer(
        [lora, *([technique()] if technique else [])], model=composer_model, optimizer=two_groups(model)
    )
    trainer.fit()
    trainer.close()
    assert lora.evidence["base_unchanged"]
    after = merged_state_dict(model)
    changed = {n for n, p in before.items() if not torch.equal(p, after[n])}
    assert changed == {f"{n}.weight" for n in QUERIES_AND_VALUES} | {"classifier.weight", "classifier.bias"}


def test_the_evidence_counts_what_is_trained() -> None:
    technique = LoRA(rank=4)
    trainer = make_trainer([technique])
    trainer.fit()
    trainer.close()
    stock = sum(p.numel() for p in tiny_bert().parameters())
    adapters, classifier = 4 * 2 * 4 * 32, 2 * 32 + 2
    assert technique.evidence["modules"] == technique.evidence["adapters_with_gradient"] == 4
    assert technique.evidence["trainable_parameters"] == adapters + classifier
    assert technique.evidence["total_parameters"] == stock + adapters + classifier
    assert technique.evidence["trained_whole"] == "classifier"
    held = {id(p) for group in trainer.state.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in trainer.state.model.parameters() if p.requires_grad}


@pytest.mark.pins
def test_a_checkpoint_holds_the_base_the_adapters_and_the_classifier(tmp_path: Path) -> None:
    trainer = make_trainer([LoRA()], save_folder=str(tmp_path), save_interval="4ba", save_filename="end.pt")
    trainer.fit()
    trainer.close()
    saved = torch.load(tmp_path / "end.pt", weights_only=False)["state"]["model"]
    torch.testing.assert_close({n: saved[n] for n in final_weights(trainer)}, final_weights(trainer), rtol=0, atol=0)
    assert "model.classifier.modules_to_save.default.weight" in saved
    assert f"model.{QUERIES_AND_VALUES[0]}.base_layer.weight" in saved


@pytest.mark.pins
def test_the_merged_weights_give_the_same_logits_and_leave_the_model_alone() -> None:
    model, stock, batches = trained_bert(), tiny_bert(seed=5), awkward_batches()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    expected = eval_logits(model, batches)
    stock.load_state_dict(merged_state_dict(model))
    assert_near(eval_logits(stock, batches), expected)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    untouched = torch.cat(eval_logits(tiny_bert(), batches))
    assert (torch.cat(expected) - untouched).abs().max() > 0.1, "nothing was adapted"


def test_the_merge_is_pefts() -> None:
    ours, theirs = trained_bert(), copy.deepcopy(trained_bert())
    for layer in adapted_layers(theirs).values():
        layer.merge()
    merged = merged_state_dict(ours)
    assert_near(
        {n: merged[f"{n}.weight"] for n in adapted_layers(theirs)},
        {n: layer.get_base_layer().weight.data for n, layer in adapted_layers(theirs).items()},
    )


@pytest.mark.pins
def test_the_adapter_folder_is_pefts_and_goes_on_a_fresh_base(tmp_path: Path) -> None:
    model, batches = trained_bert(), awkward_batches()
    save_adapter(model, tmp_path / "adapter")
    save_adapter(HuggingFaceModel(model), tmp_path / "adapter")  # again, and from the ComposerModel
    loaded = PeftModel.from_pretrained(tiny_bert(), str(tmp_path / "adapter"))
    assert_near(eval_logits(loaded, batches), eval_logits(model, batches))
    stock = loaded.merge_and_unload()
    assert_near(dict(stock.named_parameters()), {n: merged_state_dict(model)[n] for n, _ in stock.named_parameters()})
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_masked_lm_keeps_its_tied_head(tmp_path: Path) -> None:
    model = BertForMaskedLM(BertConfig(**TINY, intermediate_size=64)).eval()
    apply_lora(model, targets="all-linear")
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight)
    ids = torch.arange(1, 9)[None]
    model.save_pretrained(tmp_path / "model", state_dict=merged_state_dict(model))
    save_adapter(model, tmp_path / "adapter")
    merged = BertForMaskedLM.from_pretrained(tmp_path / "model").eval()
    assert_near([merged(ids).logits], [model(ids).logits])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["auto_mapping"]["base_model_class"] == "BertForMaskedLM"


def test_a_run_leaves_the_merged_model_and_the_adapter() -> None:
    base = tiny_bert_folder()
    settings = ["model.size=null", "model.init=pretrained", f"model.name={base}", f"data.tokenizer={base}"]
    lora = "algorithms.lora={rank: 4, targets: [query, key, value]}"
    report = run("trainer.max_duration=4ba", "algorithms.torch_compile=null", "optimizer.lr=0.02", *settings, lora)
    evidence = report["algorithms"]["lora"]["evidence"]
    assert (evidence["modules"], evidence["base_unchanged"]) == (6, True)
    weights = load_file("runs/quickstart/model/model.safetensors")
    untouched = AutoModelForSequenceClassification.from_pretrained(base)
    assert set(weights) == set(untouched.state_dict())
    merged = AutoModelForSequenceClassification.from_pretrained("runs/quickstart/model")
    config = json.loads(Path("runs/quickstart/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["task_type"]) == (4, "SEQ_CLS")
    adapted = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(config["base_model_name_or_path"]),
        "runs/quickstart/adapter",
    )
    inputs = [{k: v for k, v in b.items() if k != "labels"} for b in awkward_batches()]
    assert_near(eval_logits(adapted, inputs), eval_logits(merged, inputs))
    difference = torch.cat(eval_logits(merged, inputs)) - torch.cat(eval_logits(untouched, inputs))
    assert difference.abs().max() > 1e-3, "nothing was trained"


def tiny_bert_folder() -> Path:
    """A base model with a tokenizer, saved."""
    run("trainer.max_duration=1ba", "trainer.eval_batches=1", "algorithms=null", "run_name=base")
    return Path("runs/base/model").resolve()


def test_a_random_base_has_no_name_in_the_adapter() -> None:
    run("trainer.max_duration=1ba", "trainer.eval_batches=1", "algorithms={lora: {}}")
    config = json.loads(Path("runs/quickstart/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(ids)).tanh())


def test_a_plain_module_with_names_or_all_linear() -> None:
    ids = torch.arange(8)
    model, reference = Plain(), Plain()
    reference.load_state_dict(model.state_dict())
    assert apply_lora(model, targets=["inner"], modules_to_save=["head"], rank=2) == ["inner"]
    assert_near([model(ids)], [reference(ids)])
    model(ids).sum().backward()
    assert set(gradients(model)) == {
        "inner.lora_A.default.weight",
        "inner.lora_B.default.weight",
        "head.modules_to_save.default.weight",
        "head.modules_to_save.default.bias",
    }
    assert set(merged_state_dict(model)) == set(reference.state_dict())
    assert apply_lora(Plain(), targets="all-linear") == ["inner", "head"]


@pytest.mark.pins
def test_targets_that_match_nothing_are_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no module is called 'querry'.*dense, key, query, value"):
        apply_lora(tiny_bert(), targets=["value", "querry"])
    with pytest.raises(ValueError, match="word_embeddings is a Embedding; only Linear"):
        apply_lora(tiny_bert(), targets=["word_embeddings"])
    with pytest.raises(ValueError, match=r"no default for which modules of a Plain to adapt.*head, inner"):
        apply_lora(Plain())
    with pytest.raises(ValueError, match=r"modules_to_save: the model has no module 'haed'.*inner, head"):
        apply_lora(Plain(), targets="all-linear", modules_to_save=["haed"])
    with pytest.raises(TechniqueError, match=r"lora: targets: no module is called 'q_proj'.*or take it out"):
        make_trainer([LoRA(targets=["q_proj"])])
    untouched = tiny_bert()
    with pytest.raises(ValueError, match="no module"):
        apply_lora(untouched, targets=["q_proj"])
    assert all(p.requires_grad for p in untouched.parameters())


def test_bad_settings_and_models_with_adapters_are_refused() -> None:
    wrong: Any = "linear"
    for settings, message in [
        ({"rank": 0}, "rank must be at least 1"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"dropout": 1.0}, "dropout must be 0 to below 1"),
        ({"targets": wrong}, "targets must be 'all-linear' or a list"),
    ]:
        with pytest.raises(ValueError, match=message):
            LoRA(**settings)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            apply_lora(tiny_bert(), **settings)  # type: ignore[arg-type]
    model = tiny_bert()
    apply_lora(model, rank=2)
    with pytest.raises(ValueError, match="has PEFT adapters already"):
        apply_lora(model, rank=3)
    config = model.peft_config["default"]
    with pytest.raises(TechniqueError, match="has PEFT adapters already; give its base model"):
        make_trainer([LoRA(rank=2)], model=HuggingFaceModel(get_peft_model(tiny_bert(), config)))
    with pytest.raises(ValueError, match="no adapters; call apply_lora first"):
        save_adapter(tiny_bert(), "adapter")


def test_the_yaml_takes_lists_of_names() -> None:
    (technique,) = build_techniques({"lora": {"targets": ["query"], "rank": 2}})
    assert repr(technique) == "LoRA(rank=2, alpha=16.0, targets=['query'], dropout=0.0, modules_to_save=None)"
    with pytest.raises(ConfigError, match=r"lora.targets must be 'all-linear' or a list of str or null, not 'query'"):
        build_techniques({"lora": {"targets": "query"}})
    with pytest.raises(ConfigError, match=r"lora.targets must be .*, not \[1\]"):
        build_techniques({"lora": {"targets": [1]}})


def sabotaged(sabotage: Any, technique: LoRA | None = None) -> None:
    trainer = make_trainer([technique or LoRA()])
    sabotage(trainer)
    try:
        trainer.fit()
    finally:
        trainer.close()


@pytest.mark.pins
def test_what_undoes_it_is_noticed() -> None:
    def thaw(trainer: Any) -> None:
        weight = trainer.state.model.model.bert.pooler.dense.weight.requires_grad_()
        trainer.state.optimizers[0].param_groups[0]["params"].append(weight)

    def forget(trainer: Any) -> None:
        trainer.state.optimizers[0].param_groups[0]["params"].pop()

    def forget_all(trainer: Any) -> None:
        model = copy.deepcopy(trainer.state.model)
        trainer.state.optimizers[0].param_groups[0]["params"][:] = [p for p in model.parameters() if p.requires_grad]

    def switch_off(trainer: Any) -> None:
        for layer in adapted_layers(trainer.state.model).values():
            layer.enable_adapters(False)
        for wrapper in trained_copies(trainer.state.model).values():
            wrapper.enable_adapters(False)
        trainer.state.model.model.bert.embeddings.LayerNorm.weight.requires_grad_()  # the loss needs a gradient

    with pytest.raises(NotEngagedError, match="frozen weights were trained"):
        sabotaged(thaw)
    with pytest.raises(NotEngagedError, match=r"the optimizer does not hold classifier\.modules_to_save"):
        sabotaged(forget)
    with pytest.raises(NotEngagedError, match="the first step moved no adapter"):
        sabotaged(forget_all)
    with pytest.raises(NotEngagedError, match=r"frozen weights were trained|no adapter got a gradient"):
        sabotaged(switch_off)


def test_a_weight_decayed_behind_our_back_is_noticed() -> None:
    """Changed through ``.data``, without a gradient and without a new version of the tensor."""

    def decay(trainer: Any) -> None:
        weight = trainer.state.model.model.bert.pooler.dense.weight
        trainer.state.optimizers[0].register_step_post_hook(lambda *_: weight.data.mul_(1 - 1e-5))

    with pytest.raises(NotEngagedError, match=r"frozen weights were trained \(bert\.pooler\.dense\.weight\)"):
        sabotaged(decay)


def test_a_first_step_with_a_rate_of_zero_is_no_failure() -> None:
    technique = LoRA()
    trainer = make_trainer([technique])
    for group in trainer.state.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"] = 0.0
    trainer.fit()
    trainer.close()
    assert (technique.evidence["parameters_moved"], technique.evidence["adapters_with_gradient"]) == (0, 4)


def test_a_torch_scheduler_goes_on_with_the_groups_it_knows() -> None:
    model = tiny_bert()
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = make_trainer(
        [LoRA()],
        model=HuggingFaceModel(model),
        optimizer=optimizer,
        schedulers=scheduler,
        step_schedulers_every_batch=True,
    )
    trainer.fit()
    trainer.close()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3 * 0.5**4)


@pytest.mark.parametrize(
    "others",
    [
        lambda: [GradientCheckpointing()],
        lambda: [SDPAAttention()],
        lambda: [TorchCompile("blocks", backend="aot_eager")],
        lambda: [TorchCompile("model", backend="aot_eager"), GradientCheckpointing()],
    ],
    ids=["checkpointing", "sdpa", "blocks", "model+checkpointing"],
)
def test_beside_other_techniques_it_trains_to_the_same_weights(others: Any) -> None:
    results = []
    chosen: list[list[Any]] = [[], others()]
    for algorithms in chosen:
        model = tiny_bert()
        model.config.problem_type = "single_label_classification"  # else set in the first batch: one recompile
        trainer = make_trainer([LoRA(), *algorithms], model=model)
        trainer.fit()
        trainer.close()
        results.append(final_weights(trainer))
        for technique in algorithms:
            assert technique.engaged
            assert technique.evidence.get("graph_breaks", 0) == 0
            # The first block's input, from frozen embeddings, needs no gradient: a graph of its own.
            assert technique.evidence.get("recompiles", 0) == (technique.evidence.get("scope") == "blocks")
    assert_near(results[1], results[0])


def test_adapters_stay_float32_under_autocast() -> None:
    technique = LoRA(dropout=0.1)
    trainer = make_trainer([MixedPrecision("bf16", allow_cpu=True), technique])
    trainer.fit()
    trainer.close()
    assert {w.dtype for w in final_weights(trainer).values()} == {torch.float32}


def test_the_flops_leave_out_the_gradients_of_frozen_weights() -> None:
    full, adapted = FinetuneModel(tiny_bert()), FinetuneModel(tiny_bert())
    apply_lora(adapted)
    inputs = batch([16] * 4)
    linear = 2 * (4 * 32 * 32 + 2 * 32 * 64)  # weights of two blocks
    assert full.flops_per_batch(inputs) - adapted.flops_per_batch(inputs) == 2 * 64 * linear


def test_a_second_trainer_goes_on_with_the_same_adapters() -> None:
    model = tiny_bert()
    for _ in range(2):
        technique = LoRA()
        trainer = make_trainer([technique], model=HuggingFaceModel(model, use_logits=True), batches=plain_batches(2))
        trainer.fit()
        trainer.close()
        assert technique.evidence["modules"] == 4
        assert technique.evidence["base_unchanged"]
        assert all(p.requires_grad for group in trainer.state.optimizers[0].param_groups for p in group["params"])


@pytest.mark.gpu
def test_fp16_with_a_skipped_step_is_no_failure() -> None:
    technique = LoRA()
    trainer = make_trainer([technique, MixedPrecision("fp16")], gpu=True)  # the default scale overflows at first
    trainer.fit()
    trainer.close()
    assert technique.engaged
