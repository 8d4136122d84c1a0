# ruff: noqa: E501
"""The golden table of messages: wrong input → the exact lines that a program prints. No other test repeats them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_speedups import LoRA, TorchCompile
from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.registry import build_techniques
from composer_speedups.sweep.repeat import RepeatConfig
from composer_speedups.sweep.tune import TuneConfig
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT

FILES = {  # a config file → what its line says after "my.yaml: "
    'data: {bach_size: 3}': "unknown key 'data.bach_size'; did you mean 'data.batch_size'?",
    'batch_size: 3': "unknown key 'batch_size'; did you mean 'data.batch_size'?",
    'zzz: 1': "unknown key 'zzz'; --help lists all keys",
    'optimizer.lr: 1': "unknown key 'optimizer.lr'; write optimizer: {lr: …} in a YAML file",
    'task: mlm': "task is not a key; did you mean 'model.task'?",
    'model: {task: mlmm}': 'model.task must be one of classification, multilabel, regression, token_classification, reranking, embedding, mlm, not mlmm',
    'model: {pooling: cls}': 'model.pooling is for model.task: embedding, not classification; remove it',
    'model: {task: reranking, loss: cosine}': "model.loss must be 'bce' or 'pairwise', not 'cosine'",
    'model: {task: mlm}\ndata: {label_column: x}': "data.label_column must be null, not 'x'",
    'data: {text_columns: [a, b, c]}': 'data.text_columns names 3 columns, and task classification reads 2 at most',
    'model: {task: reranking}\ndata: {text_columns: [a]}': 'data.text_columns must be two columns, the query and the document, for task reranking',
    'model: {task: embedding}\ndata: {text_columns: [a]}': 'data.text_columns must be two columns or more for task embedding: anchor, positive, negatives',
    'model: {task: embedding, loss: cosine}': 'data.label_column is missing; model.loss=cosine needs the column of the scores',
    'model: {task: embedding, loss: cosine}\ndata: {text_columns: [a, b, c], label_column: d}': 'data.text_columns must be two columns, which model.loss=cosine compares',
    'data: {labels: [a]}': "data.labels needs at least two classes, such as [negative, positive], not ['a']",
    'data: {labels: [a, b, a]}': "data.labels lists 'a' twice; list it once",
    'data: {text_columns: [a, label]}': "data.label_column 'label' is also among data.text_columns, so the model would read the label; name another column",
    'model: {task: multilabel}\ndata: {labels: [a], label_columns: [a, b]}': 'data.labels names 1 labels for 2 data.label_columns; name one per column, or remove it',
    'model: {task: regression}\ndata: {source: random}': 'data.source random has no labels for model.task: regression; use builtin',
    'model: {task: embedding}\ntrainer: {microbatch_size: 2}': 'trainer.microbatch_size would use in-batch negatives of one micro-batch only; set model.gradient_cache instead',
    'model: {task: embedding, gradient_cache: 2}\nalgorithms: [cuda_graphs]': "model.gradient_cache recomputes each chunk with the random generator's earlier state, which cannot be read while cuda_graphs captures the step; remove one of them",
    'model: {class_weights: balanced}\ndata: {streaming: true}\nscheduler: {warmup: 1ba}\ntrainer: {max_duration: 9ba, eval_interval: 1ba}': 'model.class_weights balanced counts all labels up front; streaming cannot provide them; give the weights by class name',
    'model: {task: mlm}\ndata: {packing: true, streaming: true}\ntrainer: {max_duration: 9ba, eval_interval: 1ba}': 'data.packing joins all texts up front; streaming cannot provide them; remove it',
    'data: {batch_size: many}': "data.batch_size must be an integer or null, not 'many'",
    'data: {batch_size: 0}': 'data.batch_size must be greater than or equal to 1, not 0',
    'data: {batch_size: true}': 'data.batch_size must not be true or false',
    'data: 3': 'data must be a section of keys, not 3',
    'optimizer: {lr: -1}': 'optimizer.lr must be greater than 0, not -1',
    'optimizer: {lr: .nan}': 'optimizer.lr must be a finite number, not nan',
    'trainer: {max_duration: 2}': "trainer.max_duration must be a Composer time, a number with one of the units ep, ba, sp, tok, not '2'",
    'trainer: {max_duration: 0ep}': "trainer.max_duration must be greater than 0, not '0ep'",
    'scheduler: {warmup: 2dur}': "scheduler.warmup must be a Composer time, a number with one of the units ep, ba, sp, tok, dur, not '2dur'",
    'scheduler: {warmup: 1tok}': 'scheduler.warmup is 1tok and trainer.max_duration is 2ep, which cannot be compared; use one unit for both, or a fraction such as 0.1dur',
    'scheduler: {warmup: 5ba}\ntrainer: {max_duration: 4ba}': 'scheduler.warmup is 5ba and trainer.max_duration is 4ba, so the learning rate never reaches its peak; shorten the warm-up, or train for longer',
    'data: {streaming: true}\nscheduler: {warmup: 1ep}\ntrainer: {max_duration: 9ba, eval_interval: 1ba}': 'scheduler.warmup is 1ep, and a stream has no epochs; use batches, such as 500ba',
    'data: {streaming: true}\nscheduler: {warmup: 1ba}\ntrainer: {max_duration: 9ba, eval_interval: 1ba, early_stopping: {}}': 'trainer.early_stopping.patience is 1ep, and a stream has no epochs; use batches, such as 500ba',
    'trainer: {early_stopping: {}}': 'trainer.early_stopping.patience is 1ep, too long to stop a training of 2ep early; lower it, or train for longer',
    'trainer: {max_duration: 20ba, eval_interval: 5ba, early_stopping: {patience: 10ba}}': 'trainer.early_stopping.patience is 10ba, too long to stop a training of 20ba early; lower it, or train for longer',
    'trainer: {eval_interval: null, early_stopping: {}}': 'trainer.early_stopping needs evaluations during the training; set trainer.eval_interval',
    'trainer: {microbatch_size: some}': "trainer.microbatch_size must be an integer or 'auto' or null, not 'some'",
    'trainer: {microbatch_tokens: 9, microbatch_size: auto}': 'trainer.microbatch_tokens cannot be combined with microbatch_size=auto; set a number, or null',
    'trainer: {microbatch_tokens: 9, fsdp: {}}': 'trainer.microbatch_tokens gives ranks different numbers of forward passes, which FSDP cannot take; set microbatch_size',
    'run_name: ../up': "run_name must be letters, digits, '.', '_' and '-' (100 at most, no folder), not '../up'",
    'run_name: "a\\0b"': 'run_name must not contain NUL or a surrogate',
    "runs_folder: 'runs/{rank}'": 'runs_folder must not contain braces, which Composer replaces in some of its paths: runs/{rank}',
    'seed: 99999999999999999999': 'seed must be less than 2**63',
    'data: {labels: [yes, null]}': 'data.labels[1] must be a string or null, such as [negative, positive], not None',
    'data: {text_columns: {a: b}}': "data.text_columns must be a list, such as [text], not {'a': 'b'}",
    'model: {class_weights: equal}': "model.class_weights must be 'balanced' or a list or a dictionary or null, such as balanced or [1.0, 3.0] or {spam: 3.0}, not 'equal'",
    'model: {size: tiny}': 'model.size needs model.init: random; a pretrained model has its own size',
    'model: {init: random, size: tiny}': 'data.tokenizer is missing; a random model has no tokenizer: set data.tokenizer=wordpiece to train one, or name one',
    'data: {source: files}': 'data.train_file is missing; data.source: files needs the path or pattern of its files',
    'data: {source: mds}': 'data.train_file is missing; data.source: mds needs the folder or address of its shards',
    'data: {train_file: a.csv}': 'data.train_file has no effect with data.source: hub; set data.source=files',
    'data: {streaming: true, length_batching: 4, padding: longest}\nscheduler: {warmup: 1ba}\ntrainer: {max_duration: 9ba, eval_interval: 1ba}': 'data.length_batching needs every length up front; streaming cannot provide them; remove it',
    'data: {streaming: true, train_samples: 8}\nscheduler: {warmup: 1ba}\ntrainer: {max_duration: 9ba, eval_interval: 1ba}': 'data.train_samples draws random samples, which streaming cannot; set data.train_samples=null',
    'data: {streaming: true, on_invalid: drop}\nscheduler: {warmup: 1ba}\ntrainer: {max_duration: 9ba, eval_interval: 1ba}': 'data.on_invalid drop counts invalid rows up front; streaming cannot; set data.on_invalid=stop',
    'data: {persistent_workers: true}': 'data.persistent_workers needs data.workers of at least 1',
    'data: {prefetch_factor: 2}': 'data.prefetch_factor needs data.workers of at least 1',
    'data: {length_batching: 3}': 'data.length_batching saves no padding with data.padding: max_length; set data.padding=longest',
    'data: {batch_size: null}': 'data.batch_size is missing; set it, or data.batch_tokens',
    'data: {batch_tokens: 512}': 'data.batch_size and data.batch_tokens both determine the size of a batch; set one of them to null',
    'data: {batch_size: null, batch_tokens: 512, padding: longest}': 'data.padding gives every batch another shape than data.batch_tokens; set data.padding=max_length',
    'data: {batch_size: null, batch_tokens: 512, streaming: true}\nscheduler: {warmup: 1ba}\ntrainer: {max_duration: 9ba, eval_interval: 1ba}': 'data.batch_tokens needs every length up front; streaming cannot provide them; set data.batch_size instead',
    'data: {batch_size: null, batch_tokens: 512}\nmodel: {task: regression}': 'data.batch_tokens adds rows without a label, which the loss of model.task: regression counts; set data.batch_size',
    'data: {batch_size: null, batch_tokens: 512}\ntrainer: {microbatch_size: 8}': 'trainer.microbatch_size counts samples, of which batches of data.batch_tokens differ; set trainer.microbatch_tokens',
    'data: {source: builtin, streaming: true}': 'data.streaming is for data.source: hub or files, not builtin; remove it',
    'data: {source: random, tokenizer: wordpiece}\nmodel: {init: random}': 'data.tokenizer wordpiece is trained on texts, and data.source: random has none; name a tokenizer',
    'data: {eval_fraction: 0.1, source: builtin}': 'data.eval_fraction needs data.source: hub or files, read into memory',
    "data: {train_file: '${oc.env:NO_SUCH_VARIABLE}/x'}": 'data.train_file: KeyError raised while resolving interpolation: "Environment variable \'NO_SUCH_VARIABLE\' not found"',
    "data: {hub_name: '${nowhere}'}": "data.hub_name: Interpolation key 'nowhere' not found",
    'checkpoint: {load: /no/a.pt}': 'checkpoint.load is not a file: /no/a.pt; name a checkpoint, such as runs/NAME/checkpoints/latest-rank0.pt',
    'checkpoint: {load: my.yaml}': 'checkpoint.load is not a complete checkpoint: my.yaml; it is damaged or another kind of file',
    'checkpoint: {weights_only: true}': 'checkpoint.weights_only needs checkpoint.load, the checkpoint to load them from',
    'data: {tokenizer: wordpiece}': "data.tokenizer wordpiece trains a new vocabulary, to which the pretrained embeddings do not belong; remove it for the model's own, or set model.init=random",
    'model: {dtype: bfloat16}': "model.dtype bfloat16 weights lose most of AdamW's updates, which are below their resolution; add algorithms.kahan_optimizer={}, or keep float32 weights and compute in bf16 with mixed_precision",
    'model: {dtype: bfloat16}\nalgorithms: [kahan_optimizer]\non_unavailable: warn': 'model.dtype bfloat16 cannot be trained without kahan_optimizer; set on_unavailable=stop',
    'model: {dtype: bfloat16}\nalgorithms: {kahan_optimizer: {on_unavailable: warn}}': 'model.dtype bfloat16 cannot be trained without kahan_optimizer; set on_unavailable=stop',
    'trainer: {precision: amp_bf16}\nalgorithms: [mixed_precision]': 'trainer.precision and algorithms.mixed_precision both set the precision; remove one of them',
    'algorithms: {tf32_matmull: {}}': "unknown key 'algorithms.tf32_matmull'; did you mean 'algorithms.tf32_matmul'?",
    'algorithms: {tf32_matmul: 3}': 'algorithms.tf32_matmul must be a section of keys or null, not 3',
    'algorithms: [tf32_matmul, tf32_matmul]': "algorithms lists 'tf32_matmul' twice; list it once",
    'algorithms: tf32_matmul': "algorithms must contain technique names, not 'tf32_matmul'",
    'algorithms: {torch_compile: {scop: model}}': "unknown key 'algorithms.torch_compile.scop'; did you mean 'algorithms.torch_compile.scope'?",
    'algorithms: {torch_compile: {backend: eager, mode: x}}': "algorithms.torch_compile.mode 'x' is a mode of inductor, and the backend is 'eager'; remove one",
    'algorithms: {sparse_upcycling: {experts: 2, top_k: 3}}': 'algorithms.sparse_upcycling.top_k must be 2 to experts=2, not 3',
    'baseline: {algorithms: {lora: {rank: 0}}}': 'baseline.algorithms.lora.rank must be greater than or equal to 1, not 0',
    '[1, 2]': 'must contain keys and values at the top level, not a list',
    '': 'the file is empty or contains only comments; start from yamls/quickstart.yaml',
}  # fmt: skip

COMMAND_LINES = {  # overrides → what their line says after "command line: "
    'data.bach_size=3': "unknown key 'data.bach_size'; did you mean 'data.batch_size'?",
    'modle.size=tiny': "unknown key 'modle'; did you mean 'model'?",
    '.=1': "'.' is not a key; expected section.key=value",
    'data..batch_size=1': "'data..batch_size' is not a key; expected section.key=value",
    'algorithms.fuse=true': "unknown key 'algorithms.fuse'; did you mean 'algorithms.fused_layers'?",
}  # fmt: skip

CALLS: list[tuple[Callable[[], Any], str]] = [  # calls → the message of their ConfigError
    (lambda: parse_command_line(["-f"]), 'command line: no config file; add -f quickstart, or --help for all keys'),
    (lambda: parse_command_line(["-f", "a", "-f", "b"]), 'command line: -f names a second config file; pass one'),
    (lambda: parse_command_line(["quickstart"]), "command line: cannot read 'quickstart'; expected -f FILE or key=value"),
    (lambda: parse_command_line(["-f", "x.yaml"], "PROJECT"), "command line: cannot read '-f'; expected PROJECT or key=value"),
    (lambda: parse_command_line(["seed=3"], "PROJECT"), "command line: expected PROJECT and then key=value, not 'seed=3'; see --help"),
    (lambda: read_settings(TuneConfig, ["tune.stps=7"], "tune."), "command line: unknown key 'tune.stps'; did you mean 'tune.steps'?"),
    (lambda: read_settings(TuneConfig, ["tune.other=7"], "tune."), "command line: unknown key 'tune.other'; known: budget_seconds, output, allow, steps, repeats"),
    (lambda: read_settings(TuneConfig, ["tune.steps=["], "tune."), 'command line: the value of tune.steps is not valid YAML: while parsing a flow node expected the node content, but found \'<stream end>\' in "<unicode string>", line 1, column 2: [ ^'),
    (lambda: read_settings(TuneConfig, ["tune.allow=recipe,x"], "tune."), "command line: tune.allow[1] must be 'lower_precision' or 'recipe' or null, not 'x'"),
    (lambda: read_settings(RepeatConfig, ["seeds=1..x"]), "command line: seeds must be numbers or ranges of at most 1000, such as 1..5 or 1,2,7, not '1..x'"),
    (lambda: read_settings(RepeatConfig, ["seeds="]), 'command line: seeds must not be empty'),
    (lambda: read_settings(RepeatConfig, ["metric="]), 'command line: metric must not be empty'),
    (lambda: LoRA(rnak=3), "LoRA: unknown key 'rnak'; did you mean 'rank'?"),
    (lambda: LoRA(rank="8", dropout=1), "LoRA: rank must be an integer, not '8'\nLoRA: dropout must be less than 1, not 1"),
    (lambda: TorchCompile(mode="x", backend="eager"), "TorchCompile: mode 'x' is a mode of inductor, and the backend is 'eager'; remove one"),
    (lambda: build_techniques({"fuse": {}}), "unknown technique 'fuse'; did you mean 'fused_layers'?"),
    (lambda: build_techniques({"lora": {"targets": "query"}}), "algorithms.lora.targets must be 'all-linear' or a list, not 'query'"),
]  # fmt: skip

MANY = """
data: {bach_size: 3, packing: true, batch_size: 0}
optimizer: {lr: -1}
model: {task: reranking, temperature: 1}
algorithms: {lora: {rnak: 2, rank: 0}}
"""
LINES = [
    "command line: 'a..b' is not a key; expected section.key=value",
    "my.yaml: unknown key 'algorithms.lora.rnak'; did you mean 'algorithms.lora.rank'?",
    "my.yaml: model.temperature is for model.task: embedding, not reranking; remove it",
    "my.yaml: data.packing is for model.task: mlm, not reranking; remove it",
    "my.yaml: unknown key 'data.bach_size'; did you mean 'data.batch_size'?",
    "command line: seed must be an integer, not 'x'",
    "my.yaml: algorithms.lora.rank must be greater than or equal to 1, not 0",
    "my.yaml: data.batch_size must be greater than or equal to 1, not 0",
    "my.yaml: optimizer.lr must be greater than 0, not -1",
]


@pytest.mark.parametrize("text", FILES)
@pytest.mark.pins
def test_a_mistake_in_a_file(text: str) -> None:
    Path("my.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config("my.yaml")
    assert error.value.lines == [f"my.yaml: {FILES[text]}"]


@pytest.mark.parametrize("pairs", COMMAND_LINES)
def test_a_mistake_on_the_command_line(pairs: str) -> None:
    Path("my.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError) as error:
        load_config("my.yaml", pairs.split(" "))
    assert error.value.lines == [f"command line: {COMMAND_LINES[pairs]}"]


@pytest.mark.parametrize("text", ["a: 1\na: 2", "{", "data:\n\tseed: 1"])
def test_invalid_yaml(text: str) -> None:
    Path("my.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config("my.yaml")
    [line] = error.value.lines
    assert line.startswith("my.yaml: not valid YAML: ")


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message[:50] for _, message in CALLS])
def test_a_mistake_in_a_call(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value) == message


def test_all_mistakes_are_printed_one_line_each_and_before_the_imports() -> None:
    Path("my.yaml").write_text(MANY)
    command = [sys.executable, str(ROOT / "train.py"), "-f", "my.yaml", "seed=x", "a..b=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (2, [f"train.py: {line}" for line in LINES])


def test_a_refused_config_imports_neither_torch_nor_composer() -> None:
    code = "import sys; from composer_speedups.train.cli import read_command_line\ntry: read_command_line(['-f', 'x.yaml'])\n"
    code += "except ValueError as error: print(error); print({'torch', 'composer'} & {*sys.modules})"
    Path("x.yaml").write_text("algorithms: {lora: {rank: 0}}\nmodel: {task: mlm}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "x.yaml: algorithms.lora.rank must be greater than or equal to 1, not 0\nset()\n"
