"""The techniques' functions work in any training loop: they can be imported and called without Composer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from composer_speedups.core.catalogue import public_names
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS

# apply_early_loss changes a Composer Device, so it needs Composer.
FUNCTIONS = sorted(n for n, m in public_names().items() if m.endswith(".functional") and n != "apply_early_loss")

PROGRAM = """
import json, sys, warnings

class Deny:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "composer":
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Deny())
import composer_speedups

results = {}
for name in json.loads(sys.argv[1]):
    try:
        results[name] = callable(getattr(composer_speedups, name)) or "cannot be called"
    except ImportError as error:
        results[name] = str(error)
try:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=9)
    model = BertForSequenceClassification(BertConfig(**sizes))
    composer_speedups.apply_sdpa_attention(model)
    assert composer_speedups.apply_unpadding(model) and composer_speedups.apply_fused_layers(model)
    assert composer_speedups.apply_gradient_checkpointing(model) and composer_speedups.apply_fast_layernorm(model)
    assert composer_speedups.apply_torch_compile(model, "blocks", "eager")
    results["calls"] = True
except BaseException as error:
    results["calls"] = repr(error)
assert "composer" not in sys.modules
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    names = json.dumps(FUNCTIONS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, names], cwd=ROOT, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("name", [*FUNCTIONS, "calls"])
def test_a_function_does_not_need_composer(name: str, loaded: dict[str, Any]) -> None:
    assert loaded[name] is True
