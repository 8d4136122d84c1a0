"""What a table's file and the command line make of its arms."""

from __future__ import annotations

import re

import pytest
import yaml

from benchmarks import run as runner
from tests.benchmarks.test_benchmarks import table


def test_overrides_replace_repeats_and_axes_and_go_to_every_arm() -> None:
    read = runner.read_table(table(), ["repeats=5", "data.batch_size=64", "trainer.max_duration=3ba"])
    arms = runner.arms_of(read)
    assert read["repeats"] == 5
    assert {a.point["data.batch_size"] for a in arms} == {64}
    assert all(a.overrides[-1] == "trainer.max_duration=3ba" for a in arms)


def test_arms_can_be_picked_and_keep_what_those_above_them_add() -> None:
    arms = runner.arms_of(runner.read_table(table(matrix={}), ["arms=[plain, + y]"]))
    assert [(a.name, a.overrides) for a in arms] == [("plain", ["a=1"]), ("+ y", ["a=1", "x=1", "y=1"])]
    with pytest.raises(SystemExit, match=re.escape("must be a list of plain, + x, + y")):
        runner.read_table(table(), ["arms=[+ z]"])


def test_a_table_may_be_like_another() -> None:
    other = table(set=["a=1"], published={"where": "there", "arms": {"plain": "1"}})
    like = other.with_name("like.yaml")
    like.write_text(yaml.safe_dump({"like": other.stem, "set": ["a=2"], "repeats": 7, "matrix": {}}))
    read = runner.read_table(like)
    assert (read["repeats"], "published" in read) == (7, False)
    assert [a.overrides for a in runner.arms_of(read)] == [
        ["a=1", "a=2"],
        ["a=1", "a=2", "x=1"],
        ["a=1", "a=2", "x=1", "y=1"],
    ]
    like.write_text(yaml.safe_dump({"like": "nothing"}))
    with pytest.raises(SystemExit, match=r"nothing\.yaml: no such table, which another is to be like"):
        runner.read_table(like)


def test_an_arm_may_be_a_peer_and_stands_apart_from_what_adds_up() -> None:
    arms = {
        "plain": [],
        "+ x": ["x=1"],
        "HF": {"peer": "hf_trainer", "set": ["peer.a=1"]},
        "+ y": {"set": ["y=1"], "warm": True},
    }
    found = runner.arms_of(runner.read_table(table(matrix={}, arms=arms, losses=True)))
    assert [(a.name, a.peer, a.warm, a.overrides[1:]) for a in found] == [
        ("plain", None, False, ["loggers.file={}"]),
        ("+ x", None, False, ["x=1", "loggers.file={}"]),
        ("HF", "hf_trainer", False, ["peer.a=1", "loggers.file={}"]),
        ("+ y", None, True, ["x=1", "y=1", "loggers.file={}"]),
    ]
    with pytest.raises(SystemExit, match="arm 'HF' names no peer; there are bare_loop, hf_trainer, stock_composer"):
        runner.read_table(table(arms={"HF": {"peer": "hf"}}))
    with pytest.raises(SystemExit, match="arm 'HF' is a peer, which trains in one process; leave out ranks"):
        runner.read_table(table(arms={"HF": {"peer": "hf_trainer", "ranks": 2}}))
    with pytest.raises(SystemExit, match="arm 'x' has ranks 0; it must be a whole number of at least 1"):
        runner.read_table(table(arms={"x": {"ranks": 0}}))
    with pytest.raises(SystemExit, match="published must have where"):
        runner.read_table(table(published={"where": "there", "arms": {"+ z": "1"}}))
    with pytest.raises(SystemExit, match=r"arm 'HF' must be a list of overrides, .*or have peer, ranks, set, warm"):
        runner.read_table(table(arms={"HF": {"pear": "hf"}}))
