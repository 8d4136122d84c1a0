"""Job files in examples/: valid shell, valid launcher commands and configs, and training on two "nodes"."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from composer_speedups.core.command_line import parse_command_line
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS
from tests.helpers.jobs import SHORT

EXAMPLES = ROOT / "examples"


def fake(folder: Path, *programs: str) -> dict[str, str]:
    """Create fake programs that print their arguments as JSON (srun runs its command); return the environment."""
    folder.mkdir()
    for name in programs:
        path = folder / name
        body = 'exec env SLURM_NODEID=1 "${@:2}"' if name == "srun" else f'exec {sys.executable} -c "$CODE" {name} "$@"'
        path.write_text("#!/usr/bin/env bash\n" + ("echo node-a" if name == "scontrol" else body) + "\n")
        path.chmod(0o755)
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CODE": code}


def config_of(command: list[str]):  # type: ignore[no-untyped-def]
    given = parse_command_line(command[command.index("train.py") + 1 :])
    return load_config(ROOT / given.file, given.overrides)


@pytest.mark.parametrize("launcher", ["torchrun", "composer"])
def test_two_nodes_starts_the_right_ranks_with_a_valid_config(launcher: str) -> None:
    settings = {"NODE_RANK": "1", "MASTER_ADDR": "node-a", "LAUNCHER": launcher, "GPUS": "4"}
    environment = {**fake(Path.cwd() / "bin", "torchrun", "composer"), **settings}
    command = ["bash", str(EXAMPLES / "two_nodes.sh"), "run_name=mine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    arguments = json.loads(done.stdout)
    assert arguments[0] == launcher
    flags = dict(re.findall(r"(--?[a-z_-]+) (\S+)", " ".join(arguments[1 : arguments.index("train.py")])))
    expected = {"--nnodes": "2", "--nproc-per-node": "4", "--node-rank": "1", "--master-addr": "node-a"}
    if launcher == "composer":
        expected = {"-n": "4", "--world_size": "8", "--base_rank": "4", "--node_rank": "1", "--master_addr": "node-a"}
    assert flags.items() >= expected.items()
    config = config_of(arguments)
    assert (config.run_name, config.data.batch_size) == ("mine", 320)
    assert (config.trainer.fsdp.shard, config.trainer.fsdp.replicas) == ("full", 2)


def test_slurm_passes_nodes_and_port_on() -> None:
    slurm = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2"}
    environment = {**fake(Path.cwd() / "bin", "torchrun", "srun", "scontrol"), **slurm}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sbatch"), "seed=3"],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    arguments = json.loads(done.stdout)
    assert arguments[arguments.index("--node-rank") + 1] == "1"
    assert arguments[arguments.index("--master-port") + 1] == "20041"
    config = config_of(arguments)
    assert (config.run_name, config.seed) == ("slurm-41", 3)


def test_the_job_files_run_two_nodes_sh() -> None:
    sky = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    names = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert names["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(names["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"] == sky["num_nodes"] == 2
    for text in (sky["run"], container["args"][0]):
        assert subprocess.run(["bash", "-n", "-c", text], check=False).returncode == 0
        overrides = text.split("examples/two_nodes.sh")[1].split()
        assert load_config(ROOT / "yamls" / "bert_imdb.yaml", overrides).run_name in ("sky", "kubernetes")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "composer"])
def test_two_nodes_on_this_machine_train_together(launcher: str) -> None:
    """Two launchers with one CPU rank each; each rank is one replica."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LAUNCHER": launcher, "GPUS": "1"}
    environment = {**os.environ, **settings, "CONFIG": "yamls/quickstart.yaml"}
    overrides = [*SHORT, "trainer.device=cpu", "trainer.max_duration=3ba", f"runs_folder={Path.cwd()}/runs"]
    command = ["bash", "examples/two_nodes.sh", *overrides, f"data.cache_dir={Path.cwd()}/cache"]
    nodes = [
        subprocess.Popen(command, cwd=ROOT, env={**environment, "NODE_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    said = [node.communicate(timeout=HANGS)[1] for node in nodes]  # of both, before a failure ends the test
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(text[-3000:] for text in said)
    report = json.loads(Path("runs/quickstart/report.json").read_text())
    assert report["training"]["ranks"] == 2
    assert report["training"]["samples"] == 24
