"""The package as it is installed and imported, its pins, and the layout that docs/design.md asks for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

import composer_speedups
from composer_speedups.__main__ import command
from composer_speedups.core.registry import technique_names
from tests.conftest import ROOT

PACKAGE = ROOT / "composer_speedups"
IMPORT = """
import json, sys
before = {*sys.modules}
import composer_speedups
print(json.dumps(sorted({*sys.modules} - before)))
"""


def test_the_package_imports_itself_alone_and_without_a_warning() -> None:
    """And so in a moment: all else is imported where a name is used."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    others = {name for name in json.loads(done.stdout) if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others == {"composer_speedups"}


def test_every_public_name_is_listed_and_can_be_imported() -> None:
    names = composer_speedups.__all__
    assert {"Unpadding", "apply", "apply_recommended", "untouched", "ThroughputMonitor", "recommended"} <= set(names)
    assert set(names) <= set(dir(composer_speedups))
    for name in names:
        assert getattr(composer_speedups, name).__name__ == name
    with pytest.raises(AttributeError, match="'composer_speedups' has no attribute 'Unpading'"):
        composer_speedups.Unpading  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_defined_once(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "composer_speedups/__init__.py"
    with pytest.raises(SystemExit) as stopped:
        command(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"composer-speedups {composer_speedups.__version__}\n"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == composer_speedups.__version__


@pytest.mark.parametrize(
    ("argument", "meant"), [("train", "; did you mean composer-speedups-train?"), ("x", "; see --help")]
)
def test_a_word_after_the_command_names_the_commands(
    argument: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command([argument, "-f", "quickstart"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"composer-speedups: cannot read {argument!r}{meant}\n"


def test_the_command_without_arguments_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    command([])
    printed = capsys.readouterr().out
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(scripts) == 6
    for name in scripts:
        assert name in printed


PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def test_the_pinned_versions_are_those_that_uv_run_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    overrides = [Requirement(text) for text in project["tool"]["uv"]["override-dependencies"]]
    extras = project["project"]["optional-dependencies"]
    asked = [
        *project["project"]["dependencies"],
        *(text for name in extras if name != "dashboards" for text in extras[name]),
    ]
    replaced = {requirement.name for requirement in overrides}
    needed = [r for r in map(Requirement, asked) if r.name not in {*replaced, "composer_speedups"}]
    for requirement in [*needed, *(r for r in overrides if "never" not in str(r.marker))]:
        pins = [pin for pin in PINS if pin.name == requirement.name]
        assert pins, f"constraints.txt lacks {requirement.name}"
        for pin in pins:  # one for each range of Python's versions
            assert [s.operator for s in pin.specifier] == ["=="]
            (version,) = (specifier.version for specifier in pin.specifier)
            assert requirement.specifier.contains(version), f"{pin} in constraints.txt, {requirement} in pyproject.toml"


def test_the_pinned_versions_are_those_of_the_newest_rows_of_each_gpu() -> None:
    pinned = {pin.name: str(pin.specifier).removeprefix("==") for pin in PINS}
    for folder in (ROOT / "benchmarks" / "results").glob("nvidia-*"):
        rows = [row for path in folder.glob("*.jsonl") for row in map(json.loads, path.read_text().splitlines())]
        measured = max((row for row in rows if "call" in row), key=lambda row: row["call"])["environment"]
        for name in ("torch", "transformers", "triton"):
            assert measured[name].partition("+")[0] == pinned[name]
        assert measured["composer"] == pinned["mosaicml"]


def test_the_workflow_runs_what_a_contributor_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_at_most_six_modules_lie_directly_in_the_package() -> None:
    names = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(names) <= 6, names


def test_every_folder_of_the_tests_is_one_of_the_package() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    tests = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert tests - folders == {"benchmarks", "gpu", "helpers", "outside", "reference"}


@pytest.mark.parametrize("name", ["application.py", "startup.py", "trainer.py", "report.py"])
def test_the_application_names_no_technique(name: str) -> None:
    """What a technique wants to do before torch is imported is a hook in its folder."""
    named = re.findall(r'"(\w+)"|algorithms\.(\w+)', (PACKAGE / "train" / name).read_text())
    assert {one or other for one, other in named}.isdisjoint(technique_names())
