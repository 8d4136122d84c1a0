"""YAML and overrides → a checked config, or one line that names the key, the nearest one and the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.registry import build_techniques, technique_class
from composer_speedups.core.settings import Origins, doc_of, key_line, keys_of, section_of
from composer_speedups.train.cli import help_text
from composer_speedups.train.config.load import load_config, load_with_origins, save_config, written
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import check_same_run


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
    assert config.loggers.wandb is not None
    assert config.loggers.wandb.mode == "offline"
    assert config.callbacks.memory is None
    assert config.data.batch_size == 40


def test_algorithms_null_removes_all_techniques() -> None:
    file = write("algorithms: {torch_compile: {}, fused_optimizer: {}}")
    assert load_config(file, ["algorithms=null"]).algorithms == {}
    assert load_config(file, ["algorithms=[]", "algorithms.sdpa_attention={}"]).algorithms == {"sdpa_attention": {}}


def test_a_saved_config_loads_as_the_same_config() -> None:
    config = load_config(write("algorithms: {torch_compile: {scope: blocks}}\nloggers: {wandb: {}}"))
    save_config(config, Path("saved.yaml"))
    assert load_config("saved.yaml") == config
    assert not list(Path().glob("*.tmp"))


MISTAKES = {
    "data: {bach_size: 3}": "unknown key 'data.bach_size'; did you mean 'data.batch_size'?",
    "batch_size: 3": "unknown key 'batch_size'; did you mean 'data.batch_size'?",
    "zzz: 1": "unknown key 'zzz'; --help lists all keys",
    "optimizer: {zzz: 1}": "unknown key 'optimizer.zzz'; optimizer has: lr, weight_decay, beta1",
    "optimizer: {learning_rate: 1}": "unknown key 'optimizer.learning_rate'; did you mean 'optimizer.lr'?",
    "optimizer.lr: 1": "unknown key 'optimizer.lr'; write optimizer: {lr: …} in a YAML file",
    "trainer: {early_stopping.mode: max}": "write trainer: {early_stopping: {mode: …}} in a YAML file",
    "optimzer: {lr: 1}": "unknown key 'optimzer'; did you mean 'optimizer'?",
    "data: {batch_size: many}": "data.batch_size must be a whole number, not 'many'",
    "data: {batch_size: 1.5}": "data.batch_size",
    "data: {batch_size: 0}": "data.batch_size must be 1 to 1000000, not 0",
    "data: {batch_size: true}": "data.batch_size must be a whole number, not True",
    "data: {batch_size: null}": "data.batch_size",
    "data: 3": "data must be a section of keys, not 3",
    "data: [1]": "data must be a section of keys, not [1]",
    "optimizer: {lr: -1}": "optimizer.lr must be above 0",
    "optimizer: {lr: .nan}": "optimizer.lr must be a finite number",
    "optimizer: {lr: .inf}": "optimizer.lr must be a finite number",
    "trainer: {max_duration: 2}": "trainer.max_duration must be a Composer time",
    "trainer: {max_duration: 0ep}": "trainer.max_duration must be above 0",
    "trainer: {max_duration: 0.5dur}": "trainer.max_duration must be a Composer time",
    "scheduler: {warmup: 2dur}": "scheduler.warmup must be a Composer time",
    "scheduler: {warmup: 1tok}": "scheduler.warmup is 1tok and trainer.max_duration is 2ep, which cannot be compared",
    "scheduler: {warmup: 1ep}\ntrainer: {max_duration: 1tok}": "scheduler.warmup is 1ep and trainer",
    "scheduler: {warmup: 1000tok}\ntrainer: {max_duration: 1ba}": "scheduler.warmup is 1000tok and trainer",
    "scheduler: {warmup: 32sp}\ntrainer: {max_duration: 1ba}": "scheduler.warmup is 32sp and trainer",
    "scheduler: {warmup: 2ep}\ntrainer: {max_duration: 10sp}": "scheduler.warmup is 2ep and trainer",
    "scheduler: {warmup: 5ba}\ntrainer: {max_duration: 4ba}": "scheduler.warmup is 5ba and trainer.max_duration is 4ba"
    ", so the learning rate never reaches its peak",
    "scheduler: {warmup: 3ep}": "scheduler.warmup is 3ep and trainer.max_duration is 2ep, so the learning rate",
    "data: {streaming: true}\nscheduler: {warmup: 1ep}\ntrainer: {max_duration: 9ba, eval_interval: 1ba}": "is 1ep, "
    "and a stream has no epochs",
    "trainer: {eval_interval: null, early_stopping: {}}": "trainer.early_stopping needs evaluations during the",
    "trainer: {precision: fp16}": "trainer.precision must be 'fp32', 'amp_bf16' or 'amp_fp16', not 'fp16'",
    "trainer: {microbatch_size: some}": "trainer.microbatch_size must be a whole number or 'auto' or null, not 'some'",
    "trainer: {microbatch_size: 0}": "trainer.microbatch_size must be at least 1",
    "trainer: {microbatch_tokens: 0}": "trainer.microbatch_tokens must be at least 1",
    "trainer: {microbatch_tokens: 9, microbatch_size: auto}": "trainer.microbatch_tokens cannot be combined with "
    "microbatch_size=auto",
    "trainer: {microbatch_tokens: 9, fsdp: {}}": "trainer.microbatch_tokens gives ranks different numbers",
    "trainer: {parallelism_config: {ddp: {}}}": "trainer.parallelism_config accepts fsdp and tp, not ddp",
    "run_name: ../up": "run_name must be letters, digits",
    "runs_folder: 'runs/{rank}'": "runs_folder must not contain braces, which Composer replaces",
    "run_name: ''": "run_name must be letters, digits",
    "model: {size: tiny}": "model.size needs model.init: random",
    "model: {init: random, size: tiny}": "data.tokenizer is missing",
    "data: {source: files}": "data.train_file is missing",
    "data: {train_file: a.csv}": "data.train_file has no effect with data.source: hub",
    "data: {persistent_workers: true}": "data.persistent_workers needs data.workers",
    "data: {prefetch_factor: 2}": "data.prefetch_factor needs data.workers",
    "data: {train_file: '${oc.env:NO_SUCH_VARIABLE}/x'}": "data.train_file",
    "checkpoint: {load: nope.pt}": "checkpoint.load is not a file: nope.pt (relative to /",
    "checkpoint: {load: my.yaml}": "checkpoint.load is not a complete checkpoint: my.yaml",
    "checkpoint: {weights_only: true}": "checkpoint.weights_only needs checkpoint.load",
    "data: {tokenizer: wordpiece}": "pretrained embeddings do not belong; remove it for the model's own",
    "model: {dtype: float16}": "model.dtype",
    "model: {dtype: bfloat16}": "add algorithms.kahan_optimizer={}, or keep float32 weights",
    "model: {dtype: bfloat16}\nalgorithms: [kahan_optimizer]\nbaseline: {}": "add baseline.algorithms.kahan",
    "model: {dtype: bfloat16}\nalgorithms: [kahan_optimizer]\non_unavailable: warn": "set on_unavailable=stop",
    "model: {dtype: bfloat16}\nalgorithms: {kahan_optimizer: {on_unavailable: warn}}": "set on_unavailable=stop",
    "trainer: {precision: amp_bf16}\nalgorithms: [mixed_precision]": "both set the precision",
    "algorithms: {tf32_matmull: {}}": "algorithms.tf32_matmull is not a technique; did you mean 'tf32_matmul'?",
    "algorithms: {tf32_matmul: 3}": "algorithms.tf32_matmul must be a mapping of settings, not 3",
    "algorithms: [tf32_matmul, tf32_matmul]": "algorithms lists 'tf32_matmul' twice",
    "algorithms: tf32_matmul": "algorithms must contain technique names",
    "algorithms: [3]": "algorithms must contain technique names",
    "a: 1\na: 2": "not valid YAML",
    "{": "not valid YAML",
    "[1, 2]": "must contain keys and values",
}


@pytest.mark.parametrize("text", MISTAKES)
@pytest.mark.pins
def test_an_error_in_a_file_is_one_line_with_key_and_file(text: str) -> None:
    file = write(text, "my.yaml")
    with pytest.raises(ConfigError) as error:
        load_config(file)
    message = str(error.value)
    assert message.startswith("my.yaml: ")
    assert MISTAKES[text] in message
    assert "\n" not in message


def test_aliases_and_interpolations_of_ordinary_configs_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONG", "x" * 100)
    text = """
    run_name: ${model.name}-${seed}
    seed: ${data.seed}
    data: {seed: &seed 5, hub_name: "${oc.env:LONG}/${oc.env:MISSING,${run_name}}"}
    loggers: {wandb: {group: "${run_name}", tags: &tags [a, b]}}
    algorithms: {unpadding: {multiple: *seed}}
    """
    config = load_config(write(text, "my.yaml"), ["model.name=mine"])
    assert (config.run_name, config.seed, config.data.hub_name) == ("mine-5", 5, f"{'x' * 100}/mine-5")
    assert config.loggers.wandb is not None
    assert config.loggers.wandb.group == "mine-5"
    assert config.algorithms == {"unpadding": {"multiple": 5}}


def test_interpolations_are_written_unresolved_and_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may hold secrets. A run resumes with other values in it, but not with another variable."""
    monkeypatch.setenv("PASSWORD", "hunter2")
    text = """
    seed: ${data.seed}
    data: {hub_name: "https://me:${oc.env:PASSWORD}@host/x", train_samples: 5}
    algorithms: {torch_compile: {cache: "${oc.env:PASSWORD}/x"}, tf32_matmul: true, fused_optimizer: null}
    loggers: {wandb: {tags: [a, "${oc.env:PASSWORD}"]}}
    """
    file = write(text, "my.yaml")
    config = load_config(file)
    assert config.data.hub_name == "https://me:hunter2@host/x"
    save_config(config, Path("saved.yaml"))
    assert "hunter2" not in Path("saved.yaml").read_text()
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


def test_a_name_beside_a_size_of_the_file_is_refused() -> None:
    data = "data: {tokenizer: wordpiece}"
    file = write(f"{data}\nmodel: {{init: random, size: tiny}}", "my.yaml")
    with pytest.raises(ConfigError, match=r"command line: model\.name has no effect .* my\.yaml; add model\.init=pret"):
        load_config(file, ["model.name=mine"])
    assert load_config(file, ["model.name=mine", "model.size=null"]).model.name == "mine"
    assert load_config(file, ["model.name=mine", "model.size=base"]).model.size == "base"
    named = write(f"{data}\nmodel: {{name: mine, init: random}}", "named.yaml")
    assert load_config(named, ["model.size=base"]).model.size == "base"


@pytest.mark.parametrize("text", ["", "\n\n", "# run_name: mine\n", "null", "~", "---\n"])
def test_a_file_without_keys_does_not_start_the_default_run(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(text, "my.yaml"), ["seed=1"])
    assert str(error.value).startswith("my.yaml: the file is empty")
    assert "start from yamls/quickstart.yaml" in str(error.value)
    assert load_config(write("{}", "my.yaml")) == Config(), "an empty mapping asks for the defaults explicitly"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.bach_size=3", "command line: unknown key 'data.bach_size'; did you mean 'data.batch_size'?"),
        ("data.batch_size=-1", "command line: data.batch_size must be 1 to 1000000, not -1"),
        ("data=3", "command line: data must be a section of keys, not 3"),
        ("optimizer.lr={", "command line: the value of optimizer.lr is not valid YAML"),
        (".=1", "command line: '.' is not a key"),
        ("data..batch_size=1", "command line: 'data..batch_size' is not a key"),
        ("algorithms.fuse=true", "command line: algorithms.fuse is not a technique; did you mean"),
    ],
)
def test_an_error_in_an_override_names_the_command_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write("seed: 1"), [override])
    assert str(error.value).startswith(message)


def test_missing_and_unreadable_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml \(relative to /.*\): no such file"):
        load_config("no.yaml")
    Path("folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.yaml: cannot be read"):
        load_config("folder.yaml")
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00\x80" * 9)
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        load_config("binary.yaml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"torch_compile": {"scop": "model"}},
            "unknown key 'algorithms.torch_compile.scop'; did you mean 'algorithms.torch_compile.scope'",
        ),
        (
            {"torch_compile": {"scope": "layers"}},
            "algorithms.torch_compile.scope must be 'model' or 'blocks'",
        ),
        ({"torch_compile": {"dynamic": 1}}, "algorithms.torch_compile.dynamic must be true or false or null, not 1"),
        ({"torch_compile": {"backend": None}}, "algorithms.torch_compile.backend must be text, not None"),
        ({"torch_compile": {"backend": "eager", "mode": "x"}}, "algorithms.torch_compile: mode='x'"),
        ({"fused_optimizer": {"on_unavailable": "no"}}, "algorithms.fused_optimizer.on_unavailable must be"),
        ({"fuse": {}}, "unknown technique 'fuse'"),
    ],
)
def test_settings_of_a_technique_are_checked(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_techniques(settings, origins=Origins("my.yaml"))
    assert message in str(error.value)
    if "fuse" not in settings:
        assert str(error.value).startswith("my.yaml: ")


def test_text_is_kept_as_written_although_yaml_reads_a_boolean_number_or_date() -> None:
    names = "[no, yes, on, 007, 1e3, 1.0, 2026-11-24, 'off']"
    text = ["no", "yes", "on", "007", "1e3", "1.0", "2026-11-24", "off"]
    file = write(f"data: {{labels: {names}, label_column: off, hub_revision: 0123, streaming: no}}", "my.yaml")
    for config in (load_config(file), load_config(file, [f"data.labels={names}", f"data={{text_columns: {names}}}"])):
        assert config.data.labels == text
        assert (config.data.label_column, config.data.hub_revision) == ("off", "0123")
        assert config.data.streaming is False
        save_config(config, Path("again.yaml"))
        assert load_config("again.yaml") == config
    assert config.data.text_columns == text
    with pytest.raises(ConfigError, match=r"data\.labels must be a list of text or null, not .*None"):
        load_config(file, ["data.labels=[yes, null]"])


def test_one_text_is_a_list_and_other_containers_are_refused_with_an_example() -> None:
    config = load_config(write("data: {text_columns: review, labels: no}", "my.yaml"))
    assert (config.data.text_columns, config.data.labels) == (["review"], ["no"])
    for value in ("{a: b}", "{}"):
        with pytest.raises(ConfigError, match=r"data\.text_columns must be a list, such as \[text\], not \{"):
            load_config(overrides=[f"data.text_columns={value}"])
    with pytest.raises(ConfigError, match=r"loggers\.wandb\.tags must be a list, such as \[baseline\], not \{'a'"):
        load_config(overrides=["loggers.wandb={tags: {a: 1}}"])


def test_class_weights_are_balanced_a_list_or_a_mapping_from_names_as_written() -> None:
    weights = "{no: 1, spam: 2.5, 007: 3}"
    file = write(f"model: {{class_weights: {weights}}}", "my.yaml")
    expected = {"no": 1.0, "spam": 2.5, "007": 3.0}
    for config in (load_config(file), load_config(overrides=[f"model.class_weights={weights}"])):
        assert config.model.class_weights == expected
        save_config(config, Path("again.yaml"))
        assert load_config("again.yaml") == config
    assert load_config(file, ["model.class_weights.no=4"]).model.class_weights == {**expected, "no": 4.0}
    assert load_config(file, ["model.class_weights=balanced"]).model.class_weights == "balanced"
    for value, message in (
        ("equal", "must be 'balanced' or a list of numbers or a mapping or null, such as balanced or .*, not 'equal'"),
        ("{a: true}", "must be 'balanced' or .*, not {'a': True}"),
        ("{a: 0}", "must be above 0, not 0"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.class_weights {message}"):
            load_config(overrides=[f"model.class_weights={value}"])


def test_a_bad_technique_setting_names_the_file_or_the_command_line() -> None:
    file = write("algorithms: {torch_compile: {scope: block}}", "my.yaml")
    for override, message in [
        ("seed=1", "my.yaml: algorithms.torch_compile.scope must be"),
        ("algorithms.torch_compile.scope=layer", "command line: algorithms.torch_compile.scope must be"),
    ]:
        config, origins = load_with_origins(file, [override])
        with pytest.raises(ConfigError) as error:
            build_techniques(config.algorithms, origins=origins)
        assert str(error.value).startswith(message)


def test_on_unavailable_of_the_config_is_the_default_of_each_technique() -> None:
    built = build_techniques({"fused_optimizer": {}, "torch_compile": {"on_unavailable": "stop"}}, "warn")
    assert [t.on_unavailable for t in built] == ["warn", "stop"]
    assert technique_class("fused_optimizer").name == "fused_optimizer"


@pytest.mark.pins
def test_help_shows_every_key_with_its_description_and_default() -> None:
    text = help_text()
    for key, field, owner in keys_of(Config):
        doc = doc_of(owner, key.rpartition(".")[2])
        assert doc, f"{key} has no doc string"
        assert doc in text
        assert section_of(field) is not None or f"  {key_line(key, field)}\n      {doc}\n" in text
    assert "  data.batch_size: int = 40  [>= 1; <= 1000000]\n" in text
    assert "  trainer.max_duration: str = 2ep  [> 0; units ep, ba, sp, tok]\n" in text
    assert "  callbacks.memory: section or null = the section's defaults\n" in text
    assert "    scope: model|blocks = model\n        The whole model, or its repeated block" in text
    assert "    rank: int = 8  [>= 1; <= 4096]\n" in text
