"""Mutated configs: each key of the schema and each setting of each technique with random, mostly invalid values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from composer_speedups.core.registry import technique_class, technique_names
from composer_speedups.core.settings import keys_of
from composer_speedups.train.config.schema import Config

# As YAML, because a user's values are parsed from it.
VALUES = [
    "null", "true", "~", "''", "x", "-1", "0", "0.5", "1e-300", "1e300", str(2**31), str(2**63 - 1), str(-(2**63)),
    "9" * 30, "9" * 5000, "0x" + "f" * 4000, ".nan", "-.inf", "[]", "[null]", "[1, [2]]", "{}", "{a: {b: 1}}", "{1: 2}",
    "{null: null}", "'2ep'", "2020-01-01", "!!binary aGk=", "Größe", "'😀'", '"a\\0b"', '"\\ud800"', "'../../x'", "/",
    "/dev/null", "/proc/self/mem", "~nobody-at-all/x", "'" + "long" * 1200 + "'", "${oc.env:NO_SUCH_VARIABLE}",
    "${oc.decode:'[1'}", "${nowhere}", "${run_name}", "${", "???", "*a", "&a [*a]", "!!python/object:os.system {}",
    "[" * 60 + "]" * 60, "{a: 1, a: 2}", "'\x01\x1b[31m'", "1_000", "0b11", "1:30", "١٢", "' 3 '", "2dur", "0.5ep",
    "99999999999999999999ep", "1ep1ep", "-1ba", "all", "AUTO",
]  # fmt: skip

ODD_FILES: dict[str, bytes] = {
    "empty": b"",
    "comment": b"# nothing",
    "list": b"[1, 2]",
    "text": b"just words",
    "number": b"3",
    "two documents": b"seed: 1\n---\nseed: 2",
    "tabs": b"data:\n\tbatch_size: 3",
    "NUL": b"seed: \x001",
    "latin-1": "run_name: é".encode("latin-1"),
    "broken UTF-8": b"run_name: \xff\xfe\xfa",
    "UTF-16": "seed: 1".encode("utf-16"),
    "half a UTF-16": "seed: 1".encode("utf-16")[:-1],
    "UTF-8 with a mark": b"\xef\xbb\xbfseed: 1",
    "duplicate section": b"data: {seed: 1}\ndata: {seed: 2}",
    "duplicate key": b"data: {seed: 1, seed: 2}",
    "duplicate setting": b"algorithms: {lora: {rank: 1, rank: 2}}",
    "itself": b"algorithms: &a {lora: *a}",
    "large": b"#" * (2**20 + 1),
    "many keys": b"".join(b"k%d: 1\n" % i for i in range(1_000)),
    "complex key": b"? [a, b]\n: 1",
    "numbers for keys": b"1: 2\n1.5: 3\ntrue: 4\nnull: 5\n2020-01-01: 6",
    "object": b"run_name: !!python/object/apply:os.system ['true']",
    "anchors for sections": b"data: &d {seed: 1}\nmodel: {<<: *d}",
    "a model for algorithms": b"algorithms: ${model}",
    "itself by name": b"algorithms: ${algorithms}",
    "each other": b"run_name: ${runs_folder}\nruns_folder: ${run_name}",
}

ODD_OVERRIDES = [
    "=", "==", "=1", ".", ".=1", "a.=1", ".a=1", "a..b=1", "data", "-x", "--lr=3", "data.batch_size",
    "data.batch_size=", "data[batch_size]=3", "[data]=3", "data[0]=3", "data.batch_size.x=3", "run_name.x=3",
    "algorithms.x.y.z=1", "algorithms.lora.rank.x=1", "algorithms.[=1", "algorithms\\.lora={}", " data.seed=1",
    "data.seed =1", "😀=1", "algorithms.😀={}", "data.größe=1", "a" + ".a" * 20_000 + "=1",
    "algorithms.lora" + ".a" * 3_000 + "=1", "x" * 100_000 + "=1", "algorithms=[lora, lora]", "algorithms=[[lora]]",
    "algorithms=[null]", "algorithms={1: {}}", "algorithms={null: {}}", "algorithms={lora: {1: 2}}",
    "algorithms={loraa: {}}", "algorithms=lora", "algorithms={lora: [1]}", "algorithms.lora=3",
]  # fmt: skip


class Mutation(NamedTuple):
    what: str
    arguments: list[str]  # overrides
    file: bytes | None = None  # instead of the quickstart


def files() -> Iterator[Mutation]:
    for name, data in ODD_FILES.items():
        yield Mutation(f"file: {name}", [], data)


def overrides(seed: int, count: int) -> Iterator[Mutation]:
    """Yield odd overrides, ``count`` random values per key and setting, and several techniques and keys together."""
    rng = random.Random(seed)
    for odd in ODD_OVERRIDES:
        yield Mutation(odd[:60], [odd])
    names = [name for name, _, _ in keys_of(Config)]
    for name in technique_names():
        names += [f"algorithms.{name}"]
        names += [f"algorithms.{name}.{setting}" for setting in technique_class(name).model_fields]
    for name in names:
        for value in rng.sample(VALUES, count):
            yield Mutation(f"{name}={value[:40]}", [f"{name}={value}"])
    for _ in range(260):  # conflicts between techniques, and several errors at once
        chosen = rng.sample(technique_names(), rng.randint(2, 4))
        several = [f"algorithms.{name}={{}}" for name in chosen]
        several += [f"{rng.choice(names)}={rng.choice(VALUES)}" for _ in range(rng.randint(0, 2))]
        yield Mutation(" ".join(several)[:100], several)
