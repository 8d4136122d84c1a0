"""Markdown tables of rows: the figures of README.md, docs and the cards, and the table that the runner prints.

A ratio is always of two rows of the same call: the speed of the host differs between calls. Its base is the fastest
peer of the call at the same point of the matrix, or the first configuration of a call without peers.

Of old and new rows, a table shows those of the newest commit (:func:`.rows.newest`) of all calls that have what it
compares, unless it names calls. Accuracies do not depend on the machine: each is the newest of its configuration and
seed.
"""

from __future__ import annotations

import itertools
import operator
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.mutants import judged_by_reading
from benchmarks.rows import RESULTS, Row, describe_errors, median_step, newest, point_of, read_rows, spell

ROOT = Path(__file__).parent.parent
_OURS = (None, "own_trainer", "bare_loop")  # what runs this package's techniques; anything else is a peer
_PEERS = {  # others have the names of their modules
    "hf_trainer": "HF Trainer",
    "sentence_trainer": "sentence-transformers",
    "transformer_engine": "Transformer Engine",
}
_FAST, _FLOAT8, _OWN = "fast set", "fast set, fp8", "own Trainer"
_MODELS = {"base": "BERT-base", "large": "BERT-large", "minilm6": "MiniLM-L6", "minilm12": "MiniLM-L12"}
_MODELS |= {"deberta": "DeBERTa-v3-base", "modernbert": "ModernBERT-base", "esm2": "ESM-2, 650 M"}
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
    """All committed rows of ``TABLE``, of every GPU and of the CPU, or of ``GPU/TABLE``."""
    return [row for path in sorted(RESULTS.glob(f"{name}.jsonl" if "/" in name else f"*/{name}.jsonl"))
            for row in read_rows(path)]  # fmt: skip


def rows_of(name: str) -> list[Row]:
    """The committed rows of a table that have measurements."""
    return [row for row in committed(name) if row["environment"]]  # a row of failed runs alone has none


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


def select(selection: str, *together: str) -> list[Row]:
    """The rows of ``TABLE [KEY=VALUE …]`` at the newest commit, of calls that measured all of ``together``.

    A selection that names calls gets all of these, of whatever commits.

    Raises:
        ValueError: There are none.
    """
    rows = _meeting(selection)
    for name in together:
        calls = {row["call"] for row in rows if row["configuration"] == name and row["samples_per_sec"]}
        rows = [row for row in rows if row["call"] in calls]
    if not rows:
        raise ValueError(f"no row of '{selection}'{' in a call with ' * bool(together)}{' and '.join(together)}")
    return rows if " call=" in selection else newest(rows)


def _meeting(selection: str) -> list[Row]:
    """The rows of ``TABLE [KEY=VALUE …]`` that have measurements.

    ``KEY`` is a key of the row or of an override on its command line. A comma separates alternative values. The value
    of ``call`` is the beginning of the call's time: ``2026-01-02T03:04``.
    """
    table, *conditions = selection.split()

    def meets(row: Row, condition: str) -> bool:
        key, _, wanted = condition.partition("=")
        value = str(row[key]) if key in row else override_of(row, key)
        alternatives = wanted.split(",")
        return str(value).startswith(tuple(alternatives)) if key == "call" else value in alternatives

    return [row for row in rows_of(table) if all(meets(row, condition) for condition in conditions)]


def _title_of(peer: Row) -> str:
    """The name of a peer; 8 bits and flags that bring another package's kernels make it another one."""
    for flag in ("disentangled_flash", "unsloth"):
        if override_of(peer, f"peer.{flag}") == "true":
            return flag.replace("_", "-")
    title = _PEERS.get(peer["peer"], peer["peer"].replace("_", " "))
    return f"{title}, fp8" if _is_float8(peer) else title


def _is_float8(row: Row) -> bool:
    return "fp8" in row["configuration"]


def is_peer(row: Row) -> bool:
    """Whether a row is of a program without this package's techniques."""
    applied = override_of(row, "peer.apply_recommended") == "true" or override_of(row, "peer.max_graphs")
    return row.get("peer") not in _OURS and not applied


def base_of(rows: Sequence[Row], first: str) -> Row | None:
    """What rows of one call and point are compared with: the fastest peer, or without peers the table's first
    configuration, if it ran."""
    timed = [row for row in rows if row["samples_per_sec"]]
    own = (row for row in timed if row["configuration"] == first)
    return max(filter(is_peer, timed), key=_rate, default=None) or next(own, None)


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


def _by_call(rows: Sequence[Row], base_of: Callable[[list[Row]], Row | None]) -> list[tuple[Row, Row | None]]:
    """Each row, by batch size and call, with the one that it is compared with."""
    point = operator.itemgetter("data.batch_size", "call")
    groups = (list(own) for _, own in itertools.groupby(sorted(rows, key=point), key=point))
    return [(row, base_of(together)) for together in groups for row in together]


def _ratio_to(pairs: Iterable[tuple[Row, Row | None]]) -> str:
    """The head of the column of ratios, with the name of their base if it is always the same."""
    names = {base["configuration"] for _, base in pairs if base is not None}
    return f"ratio to {names.pop()}" if len(names) == 1 else "ratio to the fastest peer"


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


def effect(selection: str, configuration: str, before: str) -> list[str]:
    """One configuration of a table compared with another, in the calls that ran both."""
    lines, compared = [], []
    rows = select(selection, configuration, before)
    varied = {key for row in rows for key in point_of(row)} - {"data.batch_size"}
    for point, own in _by_point(rows):
        new, old = (own.get(name) for name in (configuration, before))
        if new is None or old is None:
            continue
        compared += [old, new]
        shape = _model_and_batch(new, selection) if varied else [str(point["data.batch_size"])]
        changes = [f"{_median(old, name)} → {_median(new, name)}" for name in ("peak_memory_gib", "warmup_seconds")]
        lines.append((new["call"], [", ".join(shape), _spread(old), _spread(new), _ratio(new, old), *changes]))
    columns = ["batch", f"{before}: samples/s", f"{configuration}: samples/s", "ratio", "peak GiB", "warm-up, s"]
    return _figure_by_call(columns, lines, compared)


def _by_point(rows: Sequence[Row]) -> list[tuple[Row, dict[str, Row]]]:
    """The timed rows of each call at each point, by configuration: points in order, and calls at each in theirs."""
    groups: dict[str, tuple[Row, dict[str, Row]]] = {}
    for row in rows:
        if row["samples_per_sec"]:
            point = point_of(row)
            groups.setdefault(f"{spell(point)} {row['call']}", (point, {}))[1][row["configuration"]] = row
    order = [str(row.get("model.size")) for row in rows]

    def place(group: tuple[Row, dict[str, Row]]) -> tuple[Any, ...]:
        point, own = group
        sizes = (point.get(key, 0) for key in ("data.max_length", "data.batch_size"))
        return order.index(str(point.get("model.size"))), *sizes, next(iter(own.values()))["call"]

    return sorted(groups.values(), key=place)


def _model_and_batch(row: Row, table: str) -> list[str]:
    """The name of a row's model, and its batch as ``128 × 256``, rows and tokens."""
    base = yaml.safe_load((ROOT / "yamls" / "bert_imdb_fast.yaml").read_text())["data"]
    batch, length = (
        row.get(f"data.{key}") or override_of(row, f"data.{key}") or base[key] for key in ("batch_size", "max_length")
    )
    size, name = row.get("model.size") or override_of(row, "model.size"), table.split()[0].rpartition("/")[2]
    return [_MODELS.get(str(size)) or _MODELS.get(name, name), f"{batch} × {length}"]


def accuracy(name: str, *only: str) -> list[str]:
    """The newest accuracy by configuration and seed, with the standard deviation of all runs."""
    every = [row for row in rows_of(name) if (not only or row["configuration"] in only) and row["accuracy"]]
    every.sort(key=operator.itemgetter("call"))
    rows = list({(row["configuration"], row["seed"]): row for row in every}.values())
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
    reference: str  # whose final accuracies set the target
    seconds: dict[str, list[float | None]]  # None for a run that did not reach it
    finals: dict[str, list[float]]
    ends: dict[str, list[float]]  # seconds until the last evaluation, sorted
    starts: dict[str, float]  # median seconds until training was under way
    rates: dict[str, float]  # samples/s
    base: str | None  # the peer that reached it soonest with every run
    first: str | None  # the peer that ended first

    def times(self, configuration: str) -> list[float]:
        """The times of the runs that reached the target, sorted."""
        return sorted(seconds for seconds in self.seconds[configuration] if seconds is not None)

    def median(self, configuration: str) -> float | None:
        """The median time; None if a run did not reach the target."""
        times = self.times(configuration)
        return statistics.median(times) if len(times) == len(self.seconds[configuration]) else None

    def ratio(self, configuration: str) -> float | None:
        """The time of ``base`` over that of a configuration; None if one of them has none."""
        base, own = self.base and self.median(self.base), self.median(configuration)
        return base / own if base and own else None

    def ratio_of_ends(self, configuration: str) -> float | None:
        """The median time of ``first`` until its last evaluation over that of a configuration; None without peers."""
        return statistics.median(self.ends[self.first]) / self.end(configuration) if self.first else None

    def end(self, configuration: str) -> float:
        return statistics.median(self.ends[configuration])


def reached_by(rows: Sequence[Row]) -> Reached:
    """When each run first reached the mean final accuracy of HF Trainer, minus its standard deviation over seeds.

    HF Trainer is compiled, or, where it was not measured so, the first peer; or the first configuration of all.
    """
    peers = list(dict.fromkeys(row["configuration"] for row in rows if is_peer(row)))
    names = dict.fromkeys(row["configuration"] for row in rows)
    reference = next(iter([*(peer for peer in peers if peer == "HF Trainer"), *peers, *names]))
    own = {name: [row for row in rows if row["configuration"] == name] for name in names}
    runs = {name: [run for row in of_name for run in row["evaluations"]] for name, of_name in own.items()}
    finals = {name: [run[-1]["accuracy"] for run in of_name] for name, of_name in runs.items()}
    target = statistics.fmean(finals[reference]) - statistics.stdev(finals[reference])
    seconds = {
        name: [next((e["seconds"] for e in run if e["accuracy"] >= target), None) for run in of_name]
        for name, of_name in runs.items()
    }
    ends = {name: sorted(run[-1]["seconds"] for run in of_name) for name, of_name in runs.items()}
    starts = {name: statistics.median(map(_start, of_name)) for name, of_name in runs.items()}
    rates = {name: statistics.median(map(_rate, of_name)) for name, of_name in own.items()}
    first = min(peers, key=lambda peer: statistics.median(ends[peer]), default=None)
    reached = Reached(target, reference, seconds, finals, ends, starts, rates, None, first)
    medians = {peer: median for peer in peers if (median := reached.median(peer)) is not None}
    return reached._replace(base=min(medians, key=lambda peer: medians[peer], default=None))


def _start(run: Sequence[Row]) -> float:
    """Seconds from the start of a process until training is under way: its first evaluation's time, less the median
    time from one evaluation to the next."""
    times = [evaluation["seconds"] for evaluation in run]
    return float(times[0] - statistics.median(later - one for one, later in itertools.pairwise(times)))


def time_to_accuracy(selection: str) -> list[str]:
    """The time to the last evaluation, and to the target of :func:`reached_by`, over the seeds; ratios are to the peers
    that ended first and that reached it soonest."""
    rows = [row for row in select(selection) if row.get("evaluations")]
    reached = reached_by(rows)
    lines = []
    for name, seconds in reached.seconds.items():
        times, ratio = reached.times(name), reached.ratio(name)
        spread = _seconds(times) if times else "–"
        whole, ended = _seconds(reached.ends[name]), reached.ratio_of_ends(name)
        shares = f"{reached.starts[name]:.1f}", _spell_rate(reached.rates[name]), f"{len(times)} of {len(seconds)}"
        final = f"{statistics.fmean(reached.finals[name]):.4f}"
        ratios = ["–" if number is None else f"{number:.2f}" for number in (ended, ratio)]
        lines.append([name, whole, ratios[0], *shares[:2], final, spread, ratios[1], shares[2]])
    faster, sooner = (f"speedup over {peer}" if peer else "speedup" for peer in (reached.first, reached.base))
    columns = ["configuration", "seconds in all (least–most)", faster, "start-up, s", "samples/s", "final accuracy"]
    columns += [f"seconds to {reached.target:.4f}", sooner, "runs that reached it"]
    return _figure(columns, lines, rows)


def _seconds(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} ({times[0]:.1f}–{times[-1]:.1f})"


# Figures that set the suite beside its peers


def steps(selection: str) -> list[str]:
    """Every configuration at each batch size, with its rate and median step; ratios are to :func:`base_of`."""
    rows, lines = select(selection), []
    pairs = _by_call(rows, lambda together: base_of(together, rows[0]["configuration"]))
    for row, base in pairs:
        if not row["samples_per_sec"]:
            cells = [str(row["data.batch_size"]), row["configuration"], describe_errors(row), *[""] * 4]
            lines.append((row["call"], cells))
            continue
        step = f"{1e3 * median_step(row):.1f}"
        if base is not None:
            step += f" ({median_step(base) / median_step(row):.2f})"
        cells = [_spread(row), _ratio(row, base), step, _median(row, "peak_memory_gib"), _median(row, "warmup_seconds")]
        lines.append((row["call"], [str(row["data.batch_size"]), row["configuration"], *cells]))
    columns = ["samples/s", _ratio_to(pairs), "median step, ms (ratio)", "peak GiB", "warm-up, s"]
    return _figure_by_call(["batch", "configuration", *columns], lines, rows)


class Beside(NamedTuple):
    """The suite and its peers at one point of a table's matrix, in one call."""

    model: str
    batch: str  # rows × tokens
    peers: dict[str, Row]  # the fastest configuration of each peer, by the peer's title
    ours: dict[str, Row]  # the fast set, and what else was measured of _FLOAT8 and _OWN
    base: Row  # the fastest of the peers in 16 bits or more, with which those rows are compared
    base8: Row  # the fastest of all peers, with which rows in 8 bits are compared

    @property
    def rows(self) -> list[Row]:
        return [*self.peers.values(), *self.ours.values()]

    def ratio(self, row: Row) -> float:
        """A row's rate, with that of the fastest peer of its precision as 1."""
        return _rate(row) / _rate(self.base8 if _is_float8(row) else self.base)

    @property
    def bases(self) -> str:
        """The configurations that are 1.00."""
        name = str(self.base["configuration"])
        if self.base8 is self.base or not any(map(_is_float8, self.rows)):
            return name
        return f"{name}; for fp8, {self.base8['configuration']}"


def measured_beside(selection: str) -> list[Beside]:
    """The points of ``TABLE [KEY=VALUE …]`` with a peer and the fast set, at the newest commit that has one.

    Of several calls of a point, the one with the fastest peer counts; a call with fewer peers may have a slower one.

    Raises:
        ValueError: There are none.
    """
    points = []
    for _, own in _by_point(_meeting(selection)):
        peers: dict[str, Row] = {}
        for row in sorted(filter(is_peer, own.values()), key=_rate):  # the fastest of each stays
            peers[_title_of(row)] = row
        ours = {name: own[name] for name in (_FAST, _FLOAT8, _OWN) if name in own}
        base = max((row for row in peers.values() if not _is_float8(row)), key=_rate, default=None)
        if base is not None and _FAST in ours:
            base8 = max(peers.values(), key=_rate)
            model, batch = _model_and_batch(base, selection)
            points.append(Beside(model, batch, peers, ours, base, base8))
    kept = {row["call"] for row in newest([row for beside in points for row in beside.rows])}
    best: dict[tuple[str, str], Beside] = {}
    for beside in points:
        place, chosen = (beside.model, beside.batch), best.get((beside.model, beside.batch))
        if beside.base["call"] in kept and (chosen is None or _rate(beside.base) >= _rate(chosen.base)):
            best[place] = beside
    if not best:
        raise ValueError(f"no call of {selection} has a peer and the fast set")
    return list(best.values())


def beside(*selections: str) -> list[str]:
    """The fast set beside its peers, a line for each point of each ``TABLE [KEY=VALUE …]``.

    In parentheses is the rate over that of the fastest peer, which the column "1.00 is" names; rows in 8 bits are
    compared with the fastest peer of any precision, others with the fastest that is not in 8 bits.
    """
    every = [point for selection in selections for point in measured_beside(selection)]
    rows = [row for point in every for row in point.rows]
    titles = dict.fromkeys(title for point in every for title in point.peers)
    ours = [name for name in (_FAST, _FLOAT8, _OWN) if any(name in point.ours for point in every)]
    lines = []
    for point in every:
        fast = point.ours[_FAST]
        shown = [*(point.peers.get(title) for title in titles), *(point.ours.get(name) for name in ours)]
        lines.append(
            [
                gpu_of(fast), point.model, point.batch,
                f"{fast['algorithms']['unpadding']['evidence']['padding_of_the_run']:.0%}",
                *(f"{_spell_rate(_rate(row))} ({point.ratio(row):.2f})" if row else "–" for row in shown),
                point.bases,
                f"{fast['peak_memory_gib']['median'] / point.base['peak_memory_gib']['median']:.0%}",
            ]
        )  # fmt: skip
    columns = ["GPU", "model", "batch × tokens", "padding", *titles, *ours, "1.00 is", "memory"]
    one_gpu = len({gpu for gpu, *_ in lines}) == 1
    differ = max((row["samples_per_sec"]["max"] - row["samples_per_sec"]["min"]) / _rate(row) for row in rows)
    body = table(columns[one_gpu:], (cells[one_gpu:] for cells in lines))
    runs = f"Medians of {_range(row['repeats'] for row in rows)} runs; runs of one configuration differ by up to"
    return [*body, "", f"{runs} {differ:.0%}. {where_of(rows, counted=False)}"]


def headline(*selections: str) -> list[str]:
    """One sentence: the fast set's rate over the fastest peer's at the first point of each selection, by precision."""
    first, *more = every = [measured_beside(selection)[0] for selection in selections]
    gpus = dict.fromkeys(gpu_of(point.base) for point in every)
    ratio = first.ratio(first.ours[_FAST])
    said = f"{first.model} trains {ratio:.2f} times as fast as in the fastest other program in bf16"
    if _FLOAT8 in first.ours:
        said += f" ({first.ratio(first.ours[_FLOAT8]):.2f} times with FP8, compared with the fastest in any precision)"
    others = "".join(f", and {point.model} {point.ratio(point.ours[_FAST]):.2f} times" for point in more)
    return [f"**With the recommended techniques on one {' or '.join(gpus)}, {said}{others}.**"]


def gpu_of(row: Row) -> str:
    return str(row["environment"]["gpu"] or "CPU").removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")


def jobs(selection: str) -> list[str]:
    """Seconds of each configuration from the start of its process to its end; ratios are to the fastest peer's."""
    rows, lines = select(selection), []
    pairs = _by_call(rows, lambda together: min(filter(is_peer, together), key=_process_seconds, default=None))
    for row, base in pairs:
        over = "–" if base is None else f"{_process_seconds(base) / _process_seconds(row):.2f}"
        cells = [_spread(row, "process_seconds"), over, _median(row, "warmup_seconds"), _median(row, "eval_seconds")]
        lines.append((row["call"], [str(row["data.batch_size"]), row["configuration"], *cells]))
    columns = ["start to exit, s", _ratio_to(pairs), "warm-up, s", "both evaluations, s"]
    return _figure_by_call(["batch", "configuration", *columns], lines, rows)


def _process_seconds(row: Row) -> float:
    return float(row["process_seconds"]["median"])


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
    """What runs of the tests counted, the last one of each selection of tests on a CPU and on GPUs."""
    last = {(_selected(row["arguments"]), row["environment"]["gpu"] is None): row for row in committed("suite")}
    return table(
        ("pytest", "passed", "failed", "skipped", "minutes", "on", "date, commit"),
        (
            [
                f"`{selected}`",
                *(str(row[kind]) for kind in ("passed", "failed", "skipped")),
                f"{row['seconds'] / 60:.1f}",
                _ran_on(row["environment"]),
                f"{row['call'][:10]}, {commit_of(row)}",
            ]
            for (selected, _), row in last.items()
        ),
    )


def _selected(arguments: Sequence[str]) -> str:
    """The arguments of pytest that select tests, without those for its output, plugins and processes."""
    words = iter(arguments)
    pairs = [(word, next(words)) if word in ("-p", "-n", "--dist", "-m", "-k") else (word,) for word in words]
    others = ("-p", "-n", "--dist", "-q", "--no-header")
    return shlex.join(word for pair in pairs if pair[0] not in others for word in pair)


def _ran_on(environment: Row) -> str:
    count = environment.get("gpu_count") or 0
    device = environment["gpu"] or f"{environment.get('cpu_count')} CPU cores"
    versions = [f"{name} {environment[name]}" for name in ("torch", "transformers") if environment.get(name)]
    return ", ".join([f"{count} {device}" if count > 1 else device, *versions])


def mutants() -> list[str]:
    """What the tests made of the last sample of mutants, for each package and choice of tests, as judged today."""
    last = {(row["package"], row.get("exhaustive", True)): row for row in committed("mutants")}
    ends = ("killed", "timed_out", "survived", "equivalent", "not_run")
    lines = []
    for (package, exhaustive), row in sorted(last.items()):
        counts = Counter({end: row.get(end, 0) for end in ends})
        counts.subtract(mutant["outcome"] for mutant in row["left"])
        counts.update(judged_by_reading(mutant)["outcome"] for mutant in row["left"])
        tests = "all" if exhaustive else "default"
        cells = [row["mutants"], *(counts[end] for end in ends)]
        lines.append(
            [f"`{package}`", f"seed {row['seed']}", tests, *map(str, cells), f"{row['call'][:10]}, {commit_of(row)}"]
        )
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
    """The rows of a call as a table; ratios are to :func:`base_of` at each point.

    Several ranks have an efficiency: their speed-up over a configuration of one rank, over their number. It is the one
    with the same name after a comma, such as "1 GPU, 128 each" for "2 GPUs, 128 each", or else with the longest
    beginning of that name, such as the same one for "2 GPUs, 128 each, bf16 sums".
    Seconds of whole runs and processes and published figures have columns where rows have them.
    """
    more = [column for column, (name, _) in _MORE.items() if any(row.get(name) is not None for row in rows)]
    if any(row["ranks"] > 1 for row in rows):
        more = ["median step, ms", "efficiency", *more]
    at_point: dict[str, list[Row]] = {}
    for row in rows:
        at_point.setdefault(spell(point_of(row)), []).append(row)
    columns = [column for column in (*_COLUMNS, *more) if column != "point" or len(at_point) > 1]
    pairs = [(row, base_of(at_point[spell(point_of(row))], rows[0]["configuration"])) for row in rows]
    lines = []
    for row, base in pairs:
        cells = {"configuration": row["configuration"], "point": spell(point_of(row)), **_measured(row, base)}
        cells |= {"efficiency": _efficiency(row, rows), "median step, ms": _median_step(row)}
        cells |= {column: _number(row.get(name), form) for column, (name, form) in _MORE.items()}
        lines.append([cells.get(column, "") for column in columns])
    return table([_ratio_to(pairs) if column == "ratio" else column for column in columns], lines)


def _measured(row: Row, base: Row | None) -> dict[str, str]:
    rate, failed = row["samples_per_sec"], describe_errors(row)
    if rate is None:
        return {_COLUMNS[2]: failed or "not timed"}
    text = _spread(row)
    return {
        _COLUMNS[2]: f"{text}; {failed}" if failed else text,
        "ratio": _ratio(row, base),
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
