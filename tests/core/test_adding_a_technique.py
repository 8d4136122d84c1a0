"""CONTRIBUTING.md's steps to add a technique, in a temporary folder: its code, and its entry in the tests' settings."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from composer_speedups.core import registry
from tests.conftest import ROOT
from tests.helpers.forks import Fork

DECLARATION = '''
from __future__ import annotations

from typing import Any

from pydantic import Field

from composer_speedups.core.technique import Order, Technique


class Toy(Technique):
    """Initialize the biases of the classification head with a constant."""

    name = "toy"
    order = Order.LAYERS
    effect = "exact"

    value: float = Field(0.0, ge=-1, le=1)
    """Initial value."""

    def reset(self) -> None:
        super().reset()
        self.batches = 0

    def engage(self, run: Any) -> dict[str, Any]:
        from torch import nn

        biases = [p for name, p in run.model.named_parameters() if name.endswith("classifier.bias")]
        for bias in biases:
            nn.init.constant_(bias, self.value)
        return {"value": self.value, "biases": len(biases)}

    def batch_end(self, run: Any) -> None:
        self.batches = run.state.timestamp.batch.value

    def proof(self, run: Any, seen: Any) -> dict[str, Any]:
        return {"matmuls": sum(seen.operators[name] for name in ("mm", "addmm"))}

    def summary(self, run: Any) -> dict[str, Any]:
        return {"batches": self.batches}
'''

# Inserts the entry into the source of tests/helpers/settings.py, as a contributor would.
PLUGIN = """
import sys
import types

import composer_speedups.algorithms

composer_speedups.algorithms.__path__.append({folder!r})


def pytest_configure(config):
    import tests.helpers

    file = {settings!r}
    text = open(file).read()
    begin = "ENTRIES: dict[str, Entry] = {{"
    assert begin in text
    module = types.ModuleType("tests.helpers.settings")
    module.__file__ = file
    sys.modules[module.__name__] = tests.helpers.settings = module
    entry = '"toy": Entry([{{}}, {{"value": 0.0}}], evidence=("matmuls",)),'
    exec(compile(text.replace(begin, f"{{begin}} {{entry}}"), file, "exec"), vars(module))
"""

CARD = """
# toy

```python
from composer_speedups import Toy
```
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_generic_tests_need_only_a_folder_and_an_entry(tmp_path: Path) -> None:
    folder = tmp_path / "more"
    (folder / "toy").mkdir(parents=True)
    for name, text in {"toy.py": DECLARATION, "__init__.py": "", "README.md": CARD}.items():
        (folder / "toy" / name).write_text(text)
    settings = str(ROOT / "tests" / "helpers" / "settings.py")
    (tmp_path / "toy_plugin.py").write_text(PLUGIN.format(folder=str(folder), settings=settings))
    modules = ["all_techniques", "in_code", "cards"]
    arguments = ["-p", "toy_plugin", "-p", "no:cacheprovider", "-n", "0", "-q", "--assert=plain", "-m", "not long"]
    arguments += ["-k", "toy or readme_names_every", *(f"tests/core/test_{name}.py" for name in modules)]

    def run() -> None:
        registry._classes.cache_clear()  # the forked process may have cached them
        os.chdir(ROOT)
        sys.path.insert(0, str(tmp_path))
        sys.exit(pytest.main(arguments))

    output = Fork(run).wait().stderr
    failed = set(re.findall(r"^FAILED \S*?::(\S+)", output, re.MULTILINE))
    assert failed == {
        # This test does not write the card and the line in the README's table.
        "test_a_card_has_all_sections_in_order[toy]",
        "test_the_code_of_a_card_runs[toy]",
        "test_the_other_loop_of_a_card_runs[toy]",
        "test_the_yaml_of_a_card_is_a_config[toy]",
        "test_the_yaml_of_a_card_shows_the_defaults[toy]",
        "test_the_readme_names_every_technique_and_its_code_runs",
    }, output[-6000:]
    passed = int(re.findall(r"(\d+) passed", output)[0])
    assert passed >= 25, output[-6000:]
