"""YAML and overrides → a checked config, and back. Messages are in test_messages.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.registry import build_techniques, technique_class
from composer_speedups.core.settings import doc_of, key_line, keys_of, sections_of
from composer_speedups.tasks.settings import MLMSettings, RerankingSettings
from composer_speedups.train.cli import help_text
from composer_speedups.train.config.load import load_config, save_config, written
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import check_same_run


def labels_of(config: Config) -> Any:
    return getattr(config.task, "labels", None)


def weights_of(config: Config) -> Any:
    return getattr(config.task, "class_weights", None)


def write(text: str, name: str = "x.yaml") -> str:
    Path(name).write_text(text)
    return name


@pytest.mark.pins
def test_file_and_overrides_are_merged_and_typed() -> None:
    file = write("run_name: a\noptimizer: {lr: 3e-4}\nalgorithms: [torch_compile, {sdpa_attention: {backend: math}}]")
    config = load_config(
        file,
        [
            "optimizer.weight_decay=0",
            "trainer.microbatch_size=auto",
            "algorithms.torch_compile.scope=blocks",
            "algorithms.sdpa_attention=null",
            "algorithms.fused_optimizer=true",
            "loggers.wandb={mode: offline}",
            "callbacks.memory=null",
        ],
    )
    assert isinstance(config, Config)
    assert (config.run_name, config.optimizer.lr, config.optimizer.weight_decay) == ("a", 3e-4, 0.0)
    assert config.trainer.microbatch_size == "auto"
    assert config.algorithms == {"torch_compile": {"scope": "blocks"}, "fused_optimizer": {}}
    assert config.loggers.wandb.mode == "offline"
    assert config.callbacks.memory is None
    assert config.data.batch_size == 40


def test_algorithms_null_removes_all_techniques() -> None:
    file = write("algorithms: {torch_compile: {}, fused_optimizer: {}}")
    assert load_config(file, ["algorithms=null"]).algorithms == {}
    assert load_config(file, ["algorithms=[]", "algorithms.sdpa_attention={}"]).algorithms == {"sdpa_attention": {}}


def test_aliases_and_interpolations_of_ordinary_configs_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONG", "x" * 100)
    text = """
    run_name: ${model.name}-${seed}
    seed: ${data.seed}
    data: {seed: &seed 5, hub_name: "${oc.env:LONG}/${oc.env:MISSING,${run_name}}"}
    loggers: {wandb: {group: "${run_name}", tags: &tags [a, b]}}
    algorithms: {lora: {rank: *seed}}
    """
    config = load_config(write(text, "my.yaml"), ["model.name=mine"])
    assert (config.run_name, config.seed, config.data.hub_name) == ("mine-5", 5, f"{'x' * 100}/mine-5")
    assert config.loggers.wandb.group == "mine-5"
    assert config.algorithms == {"lora": {"rank": 5}}


def test_interpolations_are_written_unresolved_and_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may hold secrets. A run resumes with other values in it, but not with another variable."""
    monkeypatch.setenv("PASSWORD", "hunter2")
    monkeypatch.setenv("SECTION", "{positive: 3.25}")
    text = """
    model: {class_weights: "${oc.decode:${oc.env:SECTION}}"}
    seed: ${data.seed}
    data: {hub_name: "https://me:${oc.env:PASSWORD}@host/x", train_samples: 5}
    algorithms: {torch_compile: {backend: "${oc.env:PASSWORD}/x"}, tf32_matmul: true, fused_optimizer: null}
    loggers: {wandb: {tags: [a, "${oc.env:PASSWORD}"]}}
    """
    file = write(text, "my.yaml")
    config = load_config(file)
    assert config.data.hub_name == "https://me:hunter2@host/x"
    save_config(config, Path("saved.yaml"))
    assert weights_of(config) == {"positive": 3.25}
    assert not [secret for secret in ("hunter2", "3.25") if secret in Path("saved.yaml").read_text()]
    assert load_config("saved.yaml") == config
    save_config(config, Path("whole.yaml"), resolved=True)
    assert load_config("whole.yaml") == config
    config.data.train_samples = 6  # changed in code
    config.algorithms, config.loggers.wandb = {}, None
    wanted = written(config)
    assert (wanted["seed"], wanted["data"]["train_samples"]) == ("${data.seed}", 6)
    assert wanted["data"]["hub_name"] == "https://me:${oc.env:PASSWORD}@host/x"
    assert (wanted["algorithms"], wanted["loggers"]["wandb"]) == ({}, None)
    monkeypatch.setenv("PASSWORD", "another")
    monkeypatch.setenv("OTHER", "hunter2")
    check_same_run(load_config(file), Path("saved.yaml"))
    with pytest.raises(ConfigError, match=r"PASSWORD\}@host/x and is https://me:\$\{oc\.env:OTHER\}@"):
        check_same_run(load_config(file, ["data.hub_name=https://me:${oc.env:OTHER}@host/x"]), Path("saved.yaml"))


def test_a_key_that_an_older_config_lacks_had_its_default_and_a_longer_training_continues() -> None:
    file = write("trainer: {max_duration: 2ep}", "my.yaml")
    stored = written(load_config(file))
    del stored["seed"], stored["data"]["batch_size"]
    Path("saved.yaml").write_text(yaml.safe_dump(stored))
    check_same_run(load_config(file, ["trainer.max_duration=3ep"]), Path("saved.yaml"))
    for override, message in (
        ("seed=3", "seed was 17 and is 3"),
        ("trainer.max_duration=${data.seed}ba", "2ep and is"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_same_run(load_config(file, [override]), Path("saved.yaml"))


def test_the_longest_patience_that_can_stop_the_training_is_accepted() -> None:
    """In units that cannot be compared, any is."""
    file = write("seed: 1", "my.yaml")
    times = ["trainer.max_duration=20ba", "trainer.eval_interval=5ba", "trainer.early_stopping.patience=9ba"]
    for overrides in (times, [*times[:2], "trainer.early_stopping.patience=9ep"]):
        assert load_config(file, overrides).trainer.early_stopping is not None


def test_a_name_beside_a_size_of_the_file_is_refused() -> None:
    data = "data: {tokenizer: wordpiece}"
    file = write(f"{data}\nmodel: {{init: random, size: tiny}}", "my.yaml")
    with pytest.raises(ConfigError, match=r"command line: model\.name has no effect .* my\.yaml; add model\.init=pret"):
        load_config(file, ["model.name=mine"])
    assert load_config(file, ["model.name=mine", "model.size=null"]).model.name == "mine"
    assert load_config(file, ["model.name=mine", "model.size=base"]).model.size == "base"
    named = write(f"{data}\nmodel: {{name: mine, init: random}}", "named.yaml")
    assert load_config(named, ["model.size=base"]).model.size == "base"


def test_the_keys_of_a_task_are_a_member_of_a_union() -> None:
    config = load_config(
        write("model: {task: reranking, loss: pairwise}\ndata: {text_columns: null, truncation: only_second}")
    )
    assert config.task == RerankingSettings(loss_name="pairwise", truncation="only_second")
    plain = config.model_dump()
    assert (plain["model"]["task"], plain["model"]["loss"]) == ("reranking", "pairwise")
    assert plain["data"]["text_columns"] == ["query", "document"]
    assert not {"task", "labels", "packing"} & (plain.keys() | plain["data"].keys())
    assert load_config(overrides=["model.task=mlm", "data.packing=true"]).task == MLMSettings(packing=True)


def test_missing_and_unreadable_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml \(relative to /.*\): no such file"):
        load_config("no.yaml")
    Path("folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.yaml: cannot be read"):
        load_config("folder.yaml")
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00\x80" * 9)
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read"):
        load_config("binary.yaml")


def test_text_is_kept_as_written_although_yaml_reads_a_boolean_number_or_date() -> None:
    names = "[no, yes, on, 007, 1e3, 1.0, 2026-11-24, 'off']"
    text = ["no", "yes", "on", "007", "1e3", "1.0", "2026-11-24", "off"]
    assert load_config(write("{}")) == Config()
    assert load_config(write("data: {text_columns: review}")).task.text_columns == ["review"]
    file = write(f"data: {{labels: {names}, label_column: off, hub_revision: 0123, streaming: no}}", "my.yaml")
    for config in (load_config(file), load_config(file, [f"data.labels={names}", "data={text_columns: [no, 007]}"])):
        assert labels_of(config) == text
        assert (config.task.label_column, config.data.hub_revision) == ("off", "0123")
        assert config.data.streaming is False
        save_config(config, Path("again.yaml"))
        assert load_config("again.yaml") == config
    assert config.task.text_columns == ["no", "007"]


def test_on_unavailable_of_the_config_is_the_default_of_each_technique() -> None:
    built = build_techniques({"fused_optimizer": {}, "torch_compile": {"on_unavailable": "stop"}}, "warn")
    assert [t.on_unavailable for t in built] == ["warn", "stop"]
    assert technique_class("fused_optimizer").name == "fused_optimizer"


DEFAULTS = """
seed=17 export=True plot=True baseline.batches=100 model.train_metrics=True model.label_smoothing=0.0
model.temperature=0.05 data.mlm_probability=0.15 data.shuffle_buffer=10000 data.seed=17 data.length_scale=1.0
data.vocab_size=4096 data.max_length=256 data.pad_to_multiple_of=8 data.batch_size=40 data.workers=0
data.pin_memory=True data.report=True optimizer.lr=0.0001 optimizer.weight_decay=0.01 optimizer.beta1=0.9
optimizer.beta2=0.999 optimizer.eps=1e-08 trainer.early_stopping.min_delta=0.0 trainer.fsdp.replicas=1
trainer.dist_timeout=300.0 trainer.progress_bar=True checkpoint.keep=1 checkpoint.autoresume=True
callbacks.throughput.window=20 callbacks.throughput.warmup_batches=3 callbacks.throughput.interval=10
callbacks.finite_loss.max_skips=10 callbacks.divergence.factor=1.5 callbacks.divergence.margin=0.1
callbacks.divergence.batches=50 callbacks.divergence.smoothing=0.9 loggers.interval=10
loggers.tensorboard.flush_interval=100 loggers.file.flush_interval=100
"""


@pytest.mark.pins
def test_help_shows_every_key_with_its_description_and_default() -> None:
    text = help_text()
    for key, field, owner in keys_of(Config):
        doc = doc_of(field)
        assert doc, f"{key} of {owner.__name__} has no doc string"
        assert sections_of(field) or f"  {key_line(key, field)}\n      {doc}\n" in text
    assert "  data.batch_size: int|null = 40  [>= 1; <= 1000000]\n" in text
    assert "  trainer.max_duration: str = 2ep  [> 0; units ep, ba, sp, tok]\n" in text
    assert "  callbacks.memory: section or null = its defaults\n" in text
    assert "\n\n  with model.task: mlm\n" in text
    assert "    scope: model|blocks = model\n        The whole model, or its repeated block" in text
    assert "    rank: int = 8  [>= 1; <= 4096]\n" in text
    defaults = {key: field.get_default(call_default_factory=True) for key, field, _ in keys_of(Config)}
    numbers = {key: value for key, value in defaults.items() if isinstance(value, int | float) and value is not False}
    assert [f"{key}={value}" for key, value in numbers.items()] == DEFAULTS.split()
