"""Reasons that are extracted from the output of a failed training process."""

from __future__ import annotations

import pytest

from composer_speedups.train.failed_process import crash_location, own_line
from tests.conftest import ROOT


def test_a_stack_is_summarized_by_its_innermost_call_and_the_packages_own() -> None:
    own = ROOT / "composer_speedups" / "fit.py"
    stack = f"""noise
Thread 0x1 (most recent call first):
  File "other.py", line 3 in waits

Current thread 0x2 (most recent call first):
  File "/lib/queue.py", line 7 in get
  File "/lib/loader.py", line 8 in batch
  File "{own}", line 9 in train_to_end
  File "/lib/main.py", line 1 in <module>
"""
    assert crash_location(stack) == ", at queue.py:7 in get under fit.py:9 in train_to_end"
    assert crash_location(stack.replace(str(own), "/lib/fit.py")) == ", at queue.py:7 in get"
    assert crash_location("a line\n") == ""


@pytest.mark.parametrize(
    ("kind", "reason"), [("Aborted", "what(): why"), ("Bus error", "Fatal Python error: Bus error")]
)
def test_the_reason_of_a_crash_is_not_a_line_of_its_stack(kind: str, reason: str) -> None:
    output = f"begins\n  what(): why\nFatal Python error: {kind}\n\nCurrent thread 0x2:\n\nExtension modules: a, b\n"
    assert own_line(output) == reason
    assert own_line(f"train.py: {kind}\n{output}") == kind
    assert own_line(f"ValueError: logged, and handled\n{output}") == reason


def test_the_reason_is_the_last_exception_rather_than_what_follows_it() -> None:
    traceback = '  File "a.py", line 1, in f\n    raise ValueError("x: y")\nValueError: bad\n'
    last = "\nDuring handling of the above exception\n\npkg.errors.CompilationError: at 262:30:\n    tl.dot(\n"
    advice = "\nSet VARIABLE=1 for the internal stack trace\n"
    assert own_line(traceback + advice) == "ValueError: bad"
    assert own_line(traceback + last + advice) == "pkg.errors.CompilationError: at 262:30:"
    assert own_line("the job failed\nan Error: seen\nended\n") == "ended"
