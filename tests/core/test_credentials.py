"""Credentials are masked in everything that a run writes; changes of the config are still detected."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_speedups.core.errors import MASK, ConfigError, is_secret_name, mask, mask_urls, masked_command_line
from composer_speedups.core.settings import keys_of
from composer_speedups.train import application
from composer_speedups.train.config.load import load_config, save_config, written
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import began_with_same_load, check_same_run
from tests.conftest import ROOT
from tests.helpers.jobs import SHORT

QUICKSTART = str(ROOT / "yamls" / "quickstart.yaml")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:pass@host/x?a=1", "https://<masked>@host/x?a=1"),
        ("https://hf_abc@host", "https://<masked>@host"),
        ("https://u:p@ss@host#x", "https://<masked>@host#x"),
        ("s3://bucket/a?X-Amz-Signature=abc&X-Amz-Date=1", "s3://bucket/a?X-Amz-Signature=<masked>&X-Amz-Date=1"),
        ("https://h/?token=a&key=b&sig=c&signature=d", "https://h/?token=<masked>&key=<masked>&sig=<masked>&signature=<masked>"),
        ("https://h/?AWSAccessKeyId=a&to%6ben=b#access_token=c", "https://h/?AWSAccessKeyId=<masked>&to%6ben=<masked>#access_token=<masked>"),
        ("https://proxy/?to=https://u:p@host", "https://proxy/?to=https://<masked>@host"),
        ("two: https://a@b, https://c@d", "two: https://<masked>@b, https://<masked>@d"),
        ("${oc.env:URL,https://u:p@host?sig=abc}", "${oc.env:URL,https://<masked>@host?sig=<masked>}"),
        ("https://${oc.env:A}:${oc.env:B}@host?sig=${oc.env:C}", None),
        ("https://user:${oc.env:B}@host", None),
        ("https://user:${oc.env:B,secret}@host", "https://<masked>@host"),
        ("https://host/a@b?monkey=1&sign=2", None),
        ("user@host, key=value and C:/sig=x", None),
    ],
)  # fmt: skip
def test_mask_urls(text: str, masked: str | None) -> None:
    assert mask_urls(text) == (masked or text)
    assert mask_urls(mask_urls(text)) == mask_urls(text)


def test_mask_values_of_secret_names() -> None:
    value = {
        "hf_token": "a",
        "apiKey": 7,
        "nested": [{"AWS_SECRET_ACCESS_KEY": "b", "password": {"x": ["c", None, True, ""]}}],
        "private-key": "${oc.env:KEY}",
        "secret": "${oc.env:KEY,d}",
        "tokenizer": "e",
        "keys": 3,
    }
    assert mask(value) == {
        "hf_token": MASK,
        "apiKey": MASK,
        "nested": [{"AWS_SECRET_ACCESS_KEY": MASK, "password": {"x": [MASK, None, True, ""]}}],
        "private-key": "${oc.env:KEY}",
        "secret": MASK,
        "tokenizer": "e",
        "keys": 3,
    }
    assert [name for name, _, _ in keys_of(Config) if is_secret_name(name)] == [], (
        "config keys must be written unmasked"
    )


GIVEN = """
run_name: ${oc.env:NAME}
seed: ${data.seed}
data: {hub_name: "https://me:${oc.env:PASSWORD}@host/x", train_samples: 5}
algorithms: {torch_compile: {cache: "${oc.env:PASSWORD}/x"}, tf32_matmul: true, fused_optimizer: null}
loggers: {wandb: {tags: [a, "${oc.env:PASSWORD}"], group: "https://token@host/"}}
"""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("PASSWORD", "hunter2")
    monkeypatch.setenv("NAME", "run")
    Path("given.yaml").write_text(GIVEN)
    return load_config("given.yaml")


def test_interpolations_are_written_unresolved_and_read_back(config: Config) -> None:
    assert config.data.hub_name == "https://me:hunter2@host/x"
    config.data.train_samples = 6  # changed in code
    wanted = written(config)
    assert (wanted["run_name"], wanted["seed"]) == ("${oc.env:NAME}", "${data.seed}")
    assert wanted["data"]["hub_name"] == "https://me:${oc.env:PASSWORD}@host/x"
    assert wanted["algorithms"] == {"torch_compile": {"cache": "${oc.env:PASSWORD}/x"}, "tf32_matmul": {}}
    assert wanted["loggers"]["wandb"]["tags"] == ["a", "${oc.env:PASSWORD}"]
    assert wanted["loggers"]["wandb"]["group"] == "https://<masked>@host/"
    save_config(config, Path("saved.yaml"))
    assert "hunter2" not in Path("saved.yaml").read_text()
    assert yaml.safe_load(Path("saved.yaml").read_text()) == wanted
    assert load_config("saved.yaml", ["loggers.wandb.group=https://token@host/"]) == config
    save_config(config, Path("whole.yaml"), credentials=True)
    assert load_config("whole.yaml") == config


def test_values_changed_in_code_are_written(config: Config) -> None:
    config.data.hub_name = "other"
    config.algorithms, config.loggers.wandb = {}, None
    assert (written(config)["data"]["hub_name"], written(config)["algorithms"]) == ("other", {})
    assert written(config)["loggers"]["wandb"] is None


def test_loading_a_masked_value_is_an_error(config: Config) -> None:
    save_config(config, Path("saved.yaml"))
    with pytest.raises(ConfigError, match=r"^saved\.yaml: loggers\.wandb\.group holds <masked>, .*\$\{oc\.env:NAME\}$"):
        load_config("saved.yaml")


def test_a_run_resumes_with_other_values_in_the_environment(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Path("stored.yaml")
    save_config(config, stored)
    check_same_run(config, stored)
    monkeypatch.setenv("PASSWORD", "another")
    check_same_run(load_config("given.yaml"), stored)
    check_same_run(load_config("given.yaml", ["loggers.wandb.group=https://another@host/"]), stored)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.hub_name=https://me:${oc.env:PASSWORD}@host/y", "@host/x and is https://me:${oc.env:PASSWORD}@host/y"),
        ("data.hub_name=https://me:${oc.env:OTHER}@host/x", "PASSWORD}@host/x and is https://me:${oc.env:OTHER}@"),
        ("data.hub_name=https://me:hunter3@host/y", "@host/x and is https://<masked>@host/y"),
        ("seed=3", "seed was ${data.seed} and is 3"),
    ],
)
def test_a_changed_key_is_named_without_credentials(
    config: Config, override: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER", "hunter2")
    save_config(config, Path("stored.yaml"))
    with pytest.raises(ConfigError) as error:
        check_same_run(load_config("given.yaml", [override]), Path("stored.yaml"))
    assert named in str(error.value)
    assert "hunter" not in str(error.value)


def test_the_initial_checkpoint_is_compared_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("URL", "s3://u:p@host/x.pt")
    config = load_config(None, ["checkpoint.load=${oc.env:URL}"])
    save_config(config, Path("stored.yaml"))
    assert began_with_same_load(config, Path("stored.yaml"))
    assert not began_with_same_load(load_config(None, ["checkpoint.load=s3://x/y.pt"]), Path("stored.yaml"))


def test_errors_show_no_credentials() -> None:
    assert str(ConfigError("data.train_file: https://u:p@host is not a folder")).endswith(
        "https://<masked>@host is not a folder"
    )


def test_the_command_line_is_masked_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train.py", "-f", "a.yaml", "data.hub_name=https://u:p@h", "x.api_key=abc", "seed=3"]
    monkeypatch.setattr(sys, "argv", arguments)
    with masked_command_line():
        assert sys.argv == [*arguments[:3], "data.hub_name=https://<masked>@h", "x.api_key=<masked>", "seed=3"]
    assert sys.argv is arguments


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_writes_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the config, the report, nor the files of any logger contain one."""
    monkeypatch.setenv("PASSWORD", "hunter2")
    arguments = [
        *("-f", QUICKSTART, *SHORT, "trainer.max_duration=1ba", "trainer.eval_batches=1", "run_name=run"),
        "data.hub_name=https://me:hunter3@host/x?sig=hunter4",
        "data.eval_file=null",
        "model.name=${oc.env:PASSWORD}",
        "model.size=tiny",  # the size in quickstart.yaml would refuse a name of the command line
        "loggers={wandb: {mode: offline}, tensorboard: {}, file: {}}",
        "algorithms.torch_compile=null",
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    application.main(arguments)
    import wandb

    wandb.teardown()
    written_files: dict[str, Any] = {}
    for folder, _, names in os.walk("runs"):
        for name in names:
            written_files[f"{folder}/{name}"] = Path(folder, name).read_bytes()
    assert [name for name, content in written_files.items() if b"hunter" in content] == []
    for ending in ("config.yaml", "report.json", "log-rank0.txt", ".wandb"):
        [content] = [
            content for name, content in written_files.items() if name.endswith(ending) and "/files/" not in name
        ]
        assert b"oc.env:PASSWORD" in content, ending
        assert b"@host/x?sig=" in content, ending
    assert json.loads(written_files["runs/run/report.json"])["config"]["model"]["name"] == "${oc.env:PASSWORD}"
