"""Markdown tables of rows: the figures of README.md, docs and the cards, and the table that the runner prints.

A ratio is always of two rows of the same call: the speed of the host differs between calls.
"""

from __future__ import annotations

import operator
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.rows import RESULTS, Row, describe_errors, median_step, point_of, read_rows, spell

ROOT = Path(__file__).parent.parent
COMMITTED = RESULTS / "nvidia-h200"  # the rows of this repository's GPU
_COLUMNS = ("configuration", "point", "samples/s (least–most)", "ratio", "peak GiB", "warm-up s")
_MORE = {  # column → what of a row it shows, and how; "run" leaves the imports out
    "run s": ("run_seconds", ".1f"),
    "process s": ("process_seconds", ".1f"),
    "published": ("published", ""),
}
_FORMATS = {"peak_memory_gib": ".1f", "warmup_seconds": ".0f", "eval_seconds": ".1f"}
# Of a kernel's name; the first match decides. Inductor's names list what was fused, so several may match.
_KINDS = {
    "communication": r"nccl|gloo|c10d::",
    "attention": r"flash|fmha|attention|sdpa|^(?!.*log_?softmax).*softmax",
    "optimizer": r"adam|multi_tensor_apply|optimizer",
    "scaling to float8": r"triton.*_scaled_mm",  # operations that inductor fuses before a float8 product
    "GEMM": r"gemm|nvjet|xmma|cublas|splitk|cutlass|::(addmm|mm|bmm|baddbmm|linear|matmul)$|mkldnn_linear|_scaled_mm",
    "activation": r"gelu|erf|tanh|relu",
    "LayerNorm, dropout, residual": r"layer_?norm|dropout|GammaBeta|masked_scale|bernoulli|seed|LayerNorm",
    "embeddings": r"embedding",
    "reductions": r"column_sums|reduce|_red_|::sum$|::mean$|_per_fused_sum|foreach_norm|LpNorm",
    "copies and casts": r"memcpy|memset|copy|catarray|::cat$|::to$|fill|zero_|contiguous",
}


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    head, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *lines))
    return [head, "|---" * len(columns) + "|", *body]


# Rows


def committed(name: str) -> list[Row]:
    """All committed rows of ``TABLE`` (those of a CPU if there are no others) or of ``GPU/TABLE``."""
    if "/" in name:
        return read_rows(RESULTS / f"{name}.jsonl")
    return read_rows(COMMITTED / f"{name}.jsonl") or read_rows(RESULTS / "cpu" / f"{name}.jsonl")


def rows_of(name: str) -> list[Row]:
    """The committed rows of a table that have measurements."""
    return [row for row in committed(name) if row["environment"]]  # a row of failed runs alone has none


def every_gpus_rows(name: str) -> list[Row]:
    """The committed rows of a name, of every GPU and of the CPU."""
    return [row for path in sorted(RESULTS.glob(f"*/{name}.jsonl")) for row in read_rows(path)]


def where_of(rows: Sequence[Row], *, counted: bool = True) -> str:
    """How often the rows ran (if ``counted``), on which hardware and versions, on which days and at which commits."""
    days = ", ".join(sorted({row["call"][:10] for row in rows}))
    commits = ", ".join(sorted({commit_of(row) for row in rows}))
    return f"{_repeats(rows) if counted else ''}{_machine(rows)}; {days}; commit {commits}."


def commit_of(row: Row) -> str:
    """The row's commit in seven digits, and whether files were changed since."""
    commit = (row["environment"].get("commit") or "unknown")[:7]
    return f"{commit} with uncommitted changes" if row["environment"].get("uncommitted_changes") else commit


def override_of(row: Row, key: str) -> str | None:
    """The last value that a row's command line gave a key; None where it gave none."""
    pairs = (item.partition("=") for item in [*row.get("overrides", []), *row.get("arguments", [])])
    return {name: given for name, _, given in pairs}.get(key)


def select(selection: str) -> list[Row]:
    """The rows of ``TABLE [KEY=VALUE …]`` that have measurements.

    ``KEY`` is a key of the row or of an override on its command line. A comma separates alternative values. The value
    of ``call`` is the beginning of the call's time: ``2026-01-02T03:04``.

    Raises:
        ValueError: There are none.
    """
    table, *conditions = selection.split()

    def meets(row: Row, condition: str) -> bool:
        key, _, wanted = condition.partition("=")
        value = str(row[key]) if key in row else override_of(row, key)
        alternatives = wanted.split(",")
        return str(value).startswith(tuple(alternatives)) if key == "call" else value in alternatives

    rows = [row for row in rows_of(table) if all(meets(row, condition) for condition in conditions)]
    if not rows:
        raise ValueError(f"no row of '{selection}'")
    return rows


def _repeats(rows: Sequence[Row]) -> str:
    """How often each configuration ran, and for how many batches; empty for rows that count no runs."""
    counts = {row["repeats"] for row in rows if "repeats" in row}
    if not counts:
        return ""
    durations = {override_of(row, "trainer.max_duration") or "" for row in rows}
    batches = ""
    if all(duration.endswith("ba") for duration in durations):
        batches = f", {_range(int(duration.removesuffix('ba')) for duration in durations)} batches each"
    each = "configuration and seed" if any("seed" in row for row in rows) else "configuration"
    if counts == {1}:
        return f"One run of each {each}{batches}. "
    single = "; one run where no range is given" if 1 in counts else ""
    middle = "median or, of two runs, mean" if 2 in counts else "median"
    return f"{_range(counts)} runs of each {each}{batches}: {middle} (least–most){single}. "


def _range(counts: Iterable[int]) -> str:
    ordered = sorted(counts)
    return "–".join(map(str, dict.fromkeys((ordered[0], ordered[-1]))))


def _machine(rows: Sequence[Row]) -> str:
    def versions(name: str, form: str = "{}") -> str:
        values = {row["environment"].get(name) for row in rows} - {None}
        return form.format(", ".join(sorted(map(str, values)))) if values else ""

    def span(name: str, form: str) -> str:
        values = {round(row["environment"][name]) for row in rows if row["environment"].get(name) is not None}
        return form.format(_range(values)) if values else ""

    on_gpu = any(row["environment"]["gpu"] for row in rows)
    parts = [
        versions("gpu") if on_gpu else versions("cpu", "CPU {}"),
        "" if on_gpu else versions("cpu_count", "{} cores"),
        span("gpu_power_limit_watts", "limit {} W"),
        span("gpu_sm_clock_mhz", "SM clock {} MHz"),
        versions("driver", "driver {}"),
        versions("torch", "torch {}"),
        versions("composer", "Composer {}"),
        versions("transformers", "transformers {}"),
    ]
    return ", ".join(filter(None, parts))


def _figure(columns: Sequence[str], lines: Iterable[Sequence[str]], rows: Sequence[Row]) -> list[str]:
    return [*table(columns, lines), "", where_of(rows)]


_Line = tuple[str, Sequence[str]]  # the call that a line's rows are of, and its cells


def _figure_by_call(columns: Sequence[str], lines: Sequence[_Line], rows: Sequence[Row]) -> list[str]:
    """A figure each of whose lines is of one call. Several calls are lettered, in a column of their own."""
    calls = sorted({row["call"] for row in rows})
    if len(calls) == 1:
        return _figure(columns, (cells for _, cells in lines), rows)
    letters = {call: chr(ord("a") + index) for index, call in enumerate(calls)}
    body = table(["call", *columns], ([letters[call], *cells] for call, cells in lines))
    described = []
    for call, letter in letters.items():
        commits = ", ".join(sorted({commit_of(row) for row in rows if row["call"] == call}))
        described.append(f"{letter}: {call[:16].replace('T', ' ')}, commit {commits}")
    return [*body, "", f"{_repeats(rows)}{_machine(rows)}. Ratios are within a call. {'; '.join(described)}."]


def _by_call(rows: Sequence[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Each row, by batch size and call, with that of the table's first configuration in the same call, if it ran."""
    first = rows[0]["configuration"]
    point = operator.itemgetter("data.batch_size", "call")
    bases = {point(row): row for row in rows if row["configuration"] == first and row["samples_per_sec"]}
    for row in sorted(rows, key=point):
        yield row, bases.get(point(row))


def _median(row: Row, name: str) -> str:
    return format(row[name]["median"], _FORMATS[name])


def _rate(row: Row) -> float:
    return float(row["samples_per_sec"]["median"])


def _ratio(row: Row, other: Row | None) -> str:
    """The rate of the one over that of the other; a dash where there is no other."""
    return "–" if other is None else f"{_rate(row) / _rate(other):.2f}"


def _spread(row: Row, name: str = "samples_per_sec") -> str:
    """A measurement of one run, or of several runs their median with the least and the most."""
    median, runs = row[name]["median"], row[name]["runs"]
    spell = _spell_rate if name == "samples_per_sec" else "{:.1f}".format
    return f"{spell(median)} ({spell(min(runs))}–{spell(max(runs))})" if len(runs) > 1 else spell(median)


# Figures of techniques


def effect(name: str, configuration: str, before: str) -> list[str]:
    """One configuration of a table compared with another, in the calls that ran both."""
    rows = {(row["data.batch_size"], row["call"], row["configuration"]): row for row in rows_of(name)}
    lines, compared = [], []
    for batch, call, which in sorted(rows):
        old, new = rows.get((batch, call, before)), rows[batch, call, which]
        if which != configuration or old is None:
            continue
        compared += [old, new]
        changes = [f"{_median(old, name)} → {_median(new, name)}" for name in ("peak_memory_gib", "warmup_seconds")]
        lines.append((call, [str(batch), _spread(old), _spread(new), _ratio(new, old), *changes]))
    if not lines:
        raise ValueError(f"no call of {name} has rows of both {configuration!r} and {before!r}")
    columns = ["batch", f"{before}: samples/s", f"{configuration}: samples/s", "ratio", "peak GiB", "warm-up, s"]
    return _figure_by_call(columns, lines, compared)


def accuracy(name: str, *only: str) -> list[str]:
    """Accuracy by configuration and seed, with the standard deviation of all runs."""
    rows = [row for row in rows_of(name) if (not only or row["configuration"] in only) and row["accuracy"]]
    seeds = sorted({row["seed"] for row in rows})
    lines = []
    for configuration in dict.fromkeys(row["configuration"] for row in rows):
        own = [row for row in rows if row["configuration"] == configuration]
        by_seed = [[run for row in own if row["seed"] == seed for run in row["accuracy"]["runs"]] for seed in seeds]
        means = [statistics.fmean(values) if values else None for values in by_seed]
        mean = None if None in means else statistics.fmean(filter(None, means))  # means of the same seeds compare
        values = [value for of_seed in by_seed for value in of_seed]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        cells = ["–" if number is None else f"{number:.4f}" for number in (*means, mean, deviation)]
        lines.append([configuration, *cells, f"{min(values):.4f}–{max(values):.4f}", str(len(values))])
    columns = ["configuration", *(f"seed {seed}" for seed in seeds), "mean", "std", "least–most", "runs"]
    return [*table(columns, lines), "", where_of(rows, counted=False)]


class Reached(NamedTuple):
    """How long each run of each configuration took to reach a target, and its final accuracy."""

    target: float
    seconds: dict[str, list[float | None]]  # None for a run that did not reach it
    finals: dict[str, list[float]]

    def times(self, configuration: str) -> list[float]:
        """The times of the runs that reached the target, sorted."""
        return sorted(seconds for seconds in self.seconds[configuration] if seconds is not None)

    def median(self, configuration: str) -> float | None:
        """The median time; None if a run did not reach the target."""
        times = self.times(configuration)
        return statistics.median(times) if len(times) == len(self.seconds[configuration]) else None


def reached_by(rows: Sequence[Row], reference: str) -> Reached:
    """When each run first reached the mean final accuracy of ``reference``, minus its standard deviation over seeds."""
    runs = {
        configuration: [run for row in rows if row["configuration"] == configuration for run in row["evaluations"]]
        for configuration in dict.fromkeys(row["configuration"] for row in rows)
    }
    finals = {configuration: [run[-1]["accuracy"] for run in own] for configuration, own in runs.items()}
    target = statistics.fmean(finals[reference]) - statistics.stdev(finals[reference])
    seconds = {
        configuration: [next((e["seconds"] for e in run if e["accuracy"] >= target), None) for run in own]
        for configuration, own in runs.items()
    }
    return Reached(target, seconds, finals)


def time_to_accuracy(name: str, reference: str) -> list[str]:
    """The time to the target of :func:`reached_by` in the last call, over its seeds; ratios are to ``reference``."""
    rows = [row for row in rows_of(name) if row.get("evaluations")]
    last = max((row["call"] for row in rows), default="")
    rows = [row for row in rows if row["call"] == last]
    reached = reached_by(rows, reference)
    lines, base = [], reached.median(reference)
    for configuration, seconds in reached.seconds.items():
        times = reached.times(configuration)
        spread = f"{statistics.median(times):.1f} ({times[0]:.1f}–{times[-1]:.1f})" if times else "–"
        median = reached.median(configuration)
        ratio = "–" if median is None or base is None else f"{base / median:.2f}"
        final = f"{statistics.fmean(reached.finals[configuration]):.4f}"
        lines.append([configuration, spread, ratio, f"{len(times)} of {len(seconds)}", final])
    to_target = f"seconds to {reached.target:.4f} (least–most)"
    columns = ["configuration", to_target, "ratio", "runs that reached it", "final accuracy"]
    return _figure(columns, lines, rows)


# Figures that set the suite beside its peers


def steps(name: str, conditions: str = "") -> list[str]:
    """Every configuration at each batch size: its rate and median step, compared with the first one's of the call."""
    rows, lines = select(f"{name} {conditions}"), []
    for row, base in _by_call(rows):
        if not row["samples_per_sec"]:
            cells = [str(row["data.batch_size"]), row["configuration"], describe_errors(row), *[""] * 4]
            lines.append((row["call"], cells))
            continue
        step = f"{1e3 * median_step(row):.1f}"
        if base is not None:
            step += f" ({median_step(base) / median_step(row):.2f})"
        cells = [_spread(row), _ratio(row, base), step, _median(row, "peak_memory_gib"), _median(row, "warmup_seconds")]
        lines.append((row["call"], [str(row["data.batch_size"]), row["configuration"], *cells]))
    first = rows[0]["configuration"]
    columns = ["samples/s", f"ratio to {first}", "median step, ms (ratio)", "peak GiB", "warm-up, s"]
    return _figure_by_call(["batch", "configuration", *columns], lines, rows)


def best(*selections: str) -> list[str]:
    """The fast set, also with 8-bit matmuls, and the fastest peers, in the call in which a peer was fastest.

    Each selection, ``TABLE [KEY=VALUE …]``, is a line. Ratios are to the faster peer.
    """
    base = yaml.safe_load((ROOT / "yamls" / "bert_imdb_fast.yaml").read_text())
    lines, rows = [], []
    for selection in selections:
        fast, float8, *peers = call = _call_with_peers(selection)
        rows += call
        gpu = (fast["environment"]["gpu"] or "CPU").removeprefix("NVIDIA ")
        length = override_of(fast, "data.max_length") or base["data"]["max_length"]
        strongest = max(peers, key=_rate)
        by_kind = {peer["peer"]: _spread(peer) for peer in peers}
        lines.append(
            [
                gpu, str(override_of(fast, "model.size")), f"{fast['data.batch_size']} × {length}",
                f"{fast['algorithms']['unpadding']['evidence']['padding_of_the_run']:.0%}",
                *(by_kind.get(kind, "–") for kind in PEERS), _spread(fast), _ratio(fast, strongest),
                _spread(float8), _ratio(float8, strongest),
                f"{fast['peak_memory_gib']['median'] / strongest['peak_memory_gib']['median']:.0%}",
            ]
        )  # fmt: skip
    columns = ["GPU", "BERT", "batch × tokens", "padding", *PEERS.values(), "fast set", "ratio", "with fp8", "ratio"]
    columns.append("memory")
    if len({gpu for gpu, *_ in lines}) == 1:
        return _figure(columns[1:], [cells for _, *cells in lines], rows)
    return _figure(columns, lines, rows)


PEERS = {"hf_trainer": "HF Trainer", "flattened_loop": "flattened loop"}


def _call_with_peers(selection: str) -> list[Row]:
    """The fast set, the fast set with fp8, and the fastest configuration of each peer, of one call."""
    rows = [row for row in select(selection) if row["samples_per_sec"]]
    calls = []
    for call in sorted({row["call"] for row in rows}):
        of_call = {row["configuration"]: row for row in rows if row["call"] == call}
        peers = [
            max(of_kind, key=_rate)
            for kind in PEERS
            if (of_kind := [row for row in of_call.values() if row["peer"] == kind])
        ]
        if peers and {"fast set", "fast set, fp8"} <= set(of_call):
            calls.append([of_call["fast set"], of_call["fast set, fp8"], *peers])
    if not calls:
        raise ValueError(f"no call of {selection} has a peer and the fast set, with and without fp8")
    return max(calls, key=lambda call: (max(_rate(row) for row in call[2:]), call[0]["call"]))


def jobs(name: str) -> list[str]:
    """Seconds of each configuration from the start of its process to its end, and those of the first one over them."""
    rows = rows_of(name)
    lines = []
    for row, base in _by_call(rows):
        seconds = row["process_seconds"]["median"]
        over = "–" if base is None else f"{base['process_seconds']['median'] / seconds:.2f}"
        cells = [_spread(row, "process_seconds"), over, _median(row, "warmup_seconds"), _median(row, "eval_seconds")]
        lines.append((row["call"], [str(row["data.batch_size"]), row["configuration"], *cells]))
    first = rows[0]["configuration"]
    columns = ["start to exit, s", f"speedup over {first}", "warm-up, s", "both evaluations, s"]
    return _figure_by_call(["batch", "configuration", *columns], lines, rows)


def kernels(name: str) -> list[str]:
    """The kernels of the last row, PyTorch's, and the time of one copy."""
    row = rows_of(name)[-1]
    return [*kernel_times(row), "", f"One run: medians of repeated calls. {where_of([row])}"]


def kernel_times(row: Row) -> list[str]:
    """The table of a row of :mod:`benchmarks.micro`."""
    lines = []
    for kernel in row["kernels"]:
        ours, theirs = kernel["us"], kernel["torch_us"]
        times = [f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}", f"{kernel['copy_us']:.0f}"]
        lines.append([kernel["name"].replace("_", " "), *times])
    return table(["kernel", "µs", "PyTorch, µs", "speedup", "lower bound: copying inputs and outputs, µs"], lines)


def suite() -> list[str]:
    """What runs of the tests counted, the last one of each command and number of GPUs."""
    last = {(tuple(row["arguments"]), row["environment"].get("gpu_count")): row for row in every_gpus_rows("suite")}
    return table(
        ("pytest", "passed", "failed", "skipped", "minutes", "on", "date, commit"),
        (
            [
                f"`{shlex.join(row['arguments'])}`",
                *(str(row[kind]) for kind in ("passed", "failed", "skipped")),
                f"{row['seconds'] / 60:.1f}",
                _ran_on(row["environment"]),
                f"{row['call'][:10]}, {commit_of(row)}",
            ]
            for row in last.values()
        ),
    )


def _ran_on(environment: Row) -> str:
    count = environment.get("gpu_count") or 0
    device = environment["gpu"] or f"{environment.get('cpu_count')} CPU cores"
    versions = [f"{name} {environment[name]}" for name in ("torch", "transformers") if environment.get(name)]
    return ", ".join([f"{count} {device}" if count > 1 else device, *versions])


def mutants() -> list[str]:
    """What the tests made of the last sample of mutants, for each package and choice of tests."""
    last = {(row["package"], row.get("exhaustive", True)): row for row in every_gpus_rows("mutants")}
    lines = [
        [
            f"`{package}`",
            f"seed {row['seed']}",
            "all" if exhaustive else "default",
            *(
                str(row.get(kind, "–"))
                for kind in ("mutants", "killed", "timed_out", "survived", "equivalent", "not_run")
            ),
            f"{row['call'][:10]}, {commit_of(row)}",
        ]
        for (package, exhaustive), row in sorted(last.items())
    ]
    kinds_of_end = ("killed", "timed out", "survived", "equivalent", "not run on a CPU")
    return table(("package", "sample", "tests", "mutants", *kinds_of_end, "date, commit"), lines)


def kinds(override: str) -> list[str]:
    """The profiles whose command line holds an override, the last one of each configuration."""
    rows = {profiled(row): row for row in rows_of("profile") if override in row["arguments"]}
    return [*kinds_of_kernels(rows), "", f"One profile of each configuration. {where_of(list(rows.values()))}"]


def kinds_of_kernels(rows: dict[str, Row]) -> list[str]:
    """A column of milliseconds per step for each profile: kinds of kernels, the slowest first."""
    columns = [_ms_by_kind(row) for row in rows.values()]
    every = dict.fromkeys(kind for column in columns for kind in column)
    order = sorted(every, key=lambda kind: -max(column.get(kind, 0.0) for column in columns))
    lines = [[kind, *(f"{column[kind]:.1f}" if kind in column else "–" for column in columns)] for kind in order]
    totals = {"GPU busy": "busy_ms", "step": "step_ms", "its matmuls alone, bf16": "gemm_floor_ms"}
    for label, key in totals.items():
        lines.append([f"**{label}**", *(f"{row[key]:.1f}" for row in rows.values())])
    return table(["ms per step", *rows], lines)


def profiled(row: Row) -> str:
    """The name of a profiled run's configuration, from its techniques."""
    techniques = row["algorithms"]
    if "fused_layers" in techniques:
        return "fast set, fp8" if "'fp8'" in techniques["fused_layers"]["settings"] else "fast set"
    if "float8_linear" in techniques:
        recipe = "rowwise" if "rowwise" in techniques["float8_linear"]["settings"] else "tensorwise"
        return f"compiled, float8 {recipe}"
    return "compiled"


def _ms_by_kind(row: Row) -> dict[str, float]:
    sums: dict[str, float] = {}
    for kernel in row["kernels"]:
        kind = kind_of(kernel["name"])
        sums[kind] = sums.get(kind, 0.0) + kernel["ms"]
    rest = row["busy_ms"] - sum(sums.values())
    return {**sums, "kernels outside the slowest": rest} if rest > 0.05 else sums


def kind_of(name: str) -> str:
    """The kind of a CUDA kernel or, in a CPU profile, of an aten operator."""
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


# A call, whole


def call(name: str, count: int | str = 1) -> list[str]:
    """The rows of a table's last committed calls, one table each, with failed configurations."""
    rows = committed(name)
    if not rows:
        return [f"Not measured yet: `python -m benchmarks.run {Path(name).name}` does it."]
    lines: list[str] = []
    for when in sorted({row["call"] for row in rows})[-int(count) :]:
        one = [row for row in rows if row["call"] == when]
        lines += [*markdown(one), "", where_of([row for row in one if row["environment"]]), ""]
    return lines[:-1]


def markdown(rows: Sequence[Row]) -> list[str]:
    """The rows of a call as a table, speed-up over the first configuration of each point.

    Several ranks have an efficiency: their speed-up over a configuration of one rank, over their number. It is the one
    with the same name after a comma, such as "1 GPU, 128 each" for "2 GPUs, 128 each", or else with the longest
    beginning of that name, such as the same one for "2 GPUs, 128 each, bf16 sums".
    Seconds of whole runs and processes and published figures have columns where rows have them.
    """
    more = [column for column, (name, _) in _MORE.items() if any(row.get(name) is not None for row in rows)]
    if any(row["ranks"] > 1 for row in rows):
        more = ["median step, ms", "efficiency", *more]
    columns = [column for column in (*_COLUMNS, *more) if column != "point" or any(map(point_of, rows))]
    first: dict[str, float] = {}  # rate of the first configuration, by point
    lines = []
    for row in rows:
        point = spell(point_of(row))
        if row["configuration"] == rows[0]["configuration"] and row["samples_per_sec"]:
            first[point] = _rate(row)
        cells = {"configuration": row["configuration"], "point": point, **_measured(row, first.get(point))}
        cells |= {"efficiency": _efficiency(row, rows), "median step, ms": _median_step(row)}
        cells |= {column: _number(row.get(name), form) for column, (name, form) in _MORE.items()}
        lines.append([cells.get(column, "") for column in columns])
    return table(columns, lines)


def _measured(row: Row, base: float | None) -> dict[str, str]:
    rate, failed = row["samples_per_sec"], describe_errors(row)
    if rate is None:
        return {_COLUMNS[2]: failed or "not timed"}
    text = _spread(row)
    return {
        _COLUMNS[2]: f"{text}; {failed}" if failed else text,
        "ratio": "–" if base is None else f"{rate['median'] / base:.2f}",
        "peak GiB": _number(row["peak_memory_gib"], ".1f"),
        "warm-up s": _number(row["warmup_seconds"], ".1f"),
    }


def _efficiency(row: Row, rows: Sequence[Row]) -> str:
    def after_comma(row: Row) -> str:
        return f"{row['configuration'].partition(', ')[2]}, "

    same = [other for other in rows if other["ranks"] == 1 and after_comma(row).startswith(after_comma(other))]
    base = max(same, key=lambda other: len(after_comma(other)), default=None)
    if row["ranks"] == 1 or not row["samples_per_sec"] or not (base and base["samples_per_sec"]):
        return ""
    return f"{_rate(row) / _rate(base) / row['ranks']:.1%}"


def _median_step(row: Row) -> str:
    came_to_a_step = any(row.get("step_seconds_p10_p50_p90") or [])
    return f"{1e3 * median_step(row):.1f}" if came_to_a_step else ""


def _spell_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _number(value: dict[str, Any] | str | None, form: str) -> str:
    """The median of a measurement; a text as it is."""
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value["median"], form)
