"""`docs/benchmarks/NAME.md` from the records of `memfit bench`.

At its top a page says what is known to be wrong with the commits of its records, and which rows are slower than what
they are compared with, and why; both stand in `notes.yaml`. Rows that several tools train stand side by side.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers.peer import PEERS
from benchmarks.text import RESULTS, table
from cli.bench import read_recipe
from lightning_memfit.bench.experiment import Experiment, load_experiment
from lightning_memfit.bench.record import Result, read_result
from lightning_memfit.bench.table import remarks, rows_table
from lightning_memfit.memory import GIB, MIB
from lightning_memfit.memory.kind import DeviceKind

_IN_RECORDS = ("step s", "loss", "source: samples/s", "source: MB")
_IN_TABLES = ("samples/s", "speed x first", "memory x first")
"""Columns that pages leave out: what the records tell beside the rates, and what tables of several tools show."""
VARIANTS = (("cpu", "small"), ("cuda", "full"))


def results_of(experiment: Experiment) -> list[Result]:
    """Committed records, in the order of the experiment's rows."""
    files = (RESULTS / experiment.folder_name / f"{row.name}.json" for row in experiment.rows)
    return [read_result(file) for file in files if file.exists()]


def page(file: Path) -> str:
    """One experiment's page."""
    variants = [load_experiment(file, scale, device, read_recipe) for device, scale in VARIANTS]
    first = variants[0]
    lines = [
        f"# {first.title}",
        f"`python -m benchmarks.pages` writes this page from `benchmarks/results/{first.name}_*/`; the rows are "
        f"in `benchmarks/experiments/{file.name}`.",
    ]
    if first.source:
        hardware, note = first.source.get("hardware", ""), first.source.get("note", "")
        lines += ["", f"Source of the figures beside ours: {first.source.get('name', '')}; {hardware}. {note}".strip()]
        lines.append("Columns `x first` compare with the first row of the same machine.")
    if first.notes:
        lines += ["", *(f"- {note}" for note in first.notes)]
    slow = "".join(paragraph(results_of(one), _title(one)) for one in variants)
    return "\n".join(lines) + "\n" + slow + "".join(map(_section, variants))


def _title(experiment: Experiment) -> str:
    return f"{experiment.device.upper()}, {experiment.scale} scale"


def _section(experiment: Experiment) -> str:
    command = f"memfit bench --experiment {experiment.name} --device {experiment.device} --scale {experiment.scale}"
    heading = f"\n## {_title(experiment)}\n"
    results = results_of(experiment)
    if not results:
        return f"\nNot measured on {experiment.device.upper()} yet: `{command} --folder benchmarks/results`.\n"
    keys = {row.name: row.key for row in experiment.rows}
    stale = ", ".join(result.title for result in results if result.key != keys[result.row])
    lines = [*remarks(results), *([f"Measured before their settings changed: {stale}."] if stale else [])]
    ours = [result for result in results if not result.peer]
    beside = ""
    if any(result.group for result in results):
        beside = f"{side_by_side(results)}\n**Ours**\n\n"
        said = {"n/a:": "n/a", "torchao's": "torchao"}  # what a remark explains must be in the table
        lines += [line for line in _REMARKS if said.get(line.split()[0], "|") in beside]
        ours = [replace(result, title=result.group) for result in ours]
    listed = "".join(f"- {line}\n" for line in lines)
    without = _IN_RECORDS + (_IN_TABLES if beside else ())
    return f"{heading}`{command}`\n\n{beside}{rows_table(ours, without)}\n{listed}"


# --- notes ------------------------------------------------------------------------------------------------------------


UNEXPLAINED = "Not explained yet."


@cache
def _notes() -> dict[str, Any]:
    notes: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("notes.yaml").read_text(encoding="utf-8"))
    return notes


def reason(page: str, row: str, result: Result | None = None) -> str:
    """Why a row of a page is slower than what it is compared with.

    Args:
        page: Name of the page.
        row: Name of the row.
        result: Its record, if it has one: a fault of its commit explains the rows that use what was at fault.
    """
    for name, fault in _notes()["faults"].items():
        if result is not None and result.commit.startswith(name) and fault["explains"] in str(result.settings):
            return f"At {name}, see above."
    return str(_notes()["reasons"].get(page, {}).get(row, UNEXPLAINED))


def faults(commits: Iterable[str]) -> list[str]:
    """What is known to be wrong with the commits at which records were made; their names may end with `-dirty`."""
    commits = tuple(commits)
    found = [(name, fault["says"]) for name, fault in _notes()["faults"].items()]
    return [says for name, says in found if any(commit.startswith(name) for commit in commits)]


def rows_with_reasons(page: str) -> set[str]:
    """Names of the rows of a page that have a reason."""
    return set(_notes()["reasons"].get(page, {}))


# --- rows that are slower ---------------------------------------------------------------------------------------------


LEAST = 0.9
"""Share of the speed that a row is compared with, below which it needs a reason."""


@dataclass(frozen=True)
class Slower:
    """A row that is slower than what it is compared with."""

    result: Result
    times: float
    """Its speed over that one's."""
    than: str
    """What it is compared with, in words."""
    is_busy: bool
    """Whether one of the two didn't have the cores for itself."""

    @property
    def figures(self) -> str:
        """The row and its figures."""
        busy = ", busy" if self.is_busy else ""
        return f"{self.result.group or self.result.title}: {self.times:.2f}x of {self.than}{busy}"


def slower(results: Sequence[Result]) -> list[Slower]:
    """Rows below `LEAST`: beside the fastest other tool of a group, or the source's ratio, or the first row."""
    found = [*_beside_tools(results), *_beside_the_first(results)]
    return [one for one in found if one.times < LEAST]


def paragraph(results: Sequence[Result], title: str) -> str:
    """Markdown: faults of the commits at which rows were measured, then the rows that are slower, by reason.

    A row is busy if it or what it is compared with was timed while other programs kept the cores busy.
    """
    if not any(map(_speed, results)):
        return ""
    by_reason: dict[str, list[str]] = {}
    for one in slower(results):
        why = reason(one.result.experiment, one.result.row, one.result)
        by_reason.setdefault(why, []).append(one.figures)
    lines = faults({result.commit for result in results})
    lines += [f"{'; '.join(figures)}. {why}" for why, figures in by_reason.items()]
    listed = "".join(f"- {line}\n" for line in lines)
    return f"\n**{title}: below {LEAST}x of the speed that a row is compared with**\n\n{listed}" if lines else ""


def _beside_tools(results: Sequence[Result]) -> Iterator[Slower]:
    for row in grouped(results).values():
        ours = row.get("")
        others = [result for peer, result in row.items() if peer and _speed(result)]
        if ours is None or not _speed(ours) or not others:
            continue
        fastest = max(others, key=_speed)
        busy = not (ours.had_cores and fastest.had_cores)
        yield Slower(ours, _speed(ours) / _speed(fastest), PEERS[fastest.peer], busy)


def _beside_the_first(results: Sequence[Result]) -> Iterator[Slower]:
    first = results[0]
    for result in results[1:]:
        if result.group or not _speed(result) or not _speed(first):
            continue
        times, than = _speed(result) / _speed(first), "the first row"
        mine, of_first = (one.reference.get("samples_per_second", 0.0) for one in (result, first))
        if mine and of_first:
            than = "the source's ratio"
            times /= mine / of_first
        yield Slower(result, times, than, not (result.had_cores and first.had_cores))


def _speed(result: Result) -> float:
    return (result.speed.samples_per_second or 0.0) if result.speed and result.status == "ok" else 0.0


# --- rows of several tools: who needs less memory, who is faster, by how much -----------------------------------------


_TOOLS = {"": "lightning-memfit", **PEERS}
_MEMORY_TOLERANCE, _HOST_TOLERANCE = 0.01, 0.1  # live tensors are the same in every run, resident memory isn't

Groups = dict[str, dict[str, Result]]
"""Results by group, then by tool."""

_REMARKS = (
    "Every row runs in a process of its own, on the same batches from the same weights. Peers are measured with this "
    "package's own clock and ledger; nothing is predicted for them. busy: other programs kept the cores busy. A dash: "
    "there is no such row. The experiment says what each tool is told beside model, data, batch, steps and precision.",
    "Resident memory is followed from before the model is built to the last step, and is good to some tens of MiB.",
    "n/a: on the CPU nothing tells tensors that a peer keeps in host memory from those on a device; resident memory "
    "holds both. What this package keeps on the host is left out of its live tensors.",
    "torchao's compiled steps run unfollowed: its states are counted, what a step holds for a moment isn't.",
)


def grouped(results: Sequence[Result]) -> Groups:
    """The rows that belong to a group, in their order."""
    groups: Groups = {}
    for result in results:
        if result.group:
            groups.setdefault(result.group, {})[result.peer] = result
    return groups


def side_by_side(results: Sequence[Result]) -> str:
    """Markdown: all figures of each group and tool, and where a peer is better."""
    groups = grouped(results)
    tools = [tool for tool in _TOOLS if any(tool in row for row in groups.values())]
    measures = _measures([result for row in groups.values() for result in row.values()])
    lines = [[group, *(_cell(measures, row.get(tool)) for tool in tools)] for group, row in groups.items()]
    return (
        f"In each cell: {' / '.join(measures)}.\n\n"
        f"{table(['', *(_TOOLS[tool] for tool in tools)], lines, right=len(tools))}\n\n"
        f"**Where another tool is better**\n\n" + "".join(f"- {line}\n" for line in better_peers(results))
    )


def better_peers(results: Sequence[Result]) -> list[str]:
    """A sentence for each group in which a peer beats this package by more than a figure's noise."""
    found = {group: list(_better(row)) for group, row in grouped(results).items()}
    return [f"{group}: {'; '.join(words)}." for group, words in found.items() if words] or ["Nowhere, beyond noise."]


def _better(row: dict[str, Result]) -> Iterator[str]:
    ours = row.get("")
    for peer, theirs in row.items():
        if ours is None or not peer or theirs.status != "ok":
            continue
        words = []
        for what, value, tolerance in (
            ("live tensors", _live, _MEMORY_TOLERANCE),
            ("resident memory", _resident, _HOST_TOLERANCE),
        ):
            mine, other = value(ours), value(theirs)
            if mine and other and other < mine * (1 - tolerance):
                words.append(f"{1 - other / mine:.0%} less {what}")
        if ours.had_cores and theirs.had_cores and _is_faster(theirs, ours):
            words.append(f"{_speed(theirs) / (_speed(ours) or 1):.2f} times as fast")
        if words:
            yield f"{_TOOLS[peer]} ({', '.join(words)})"


Measures = dict[str, Callable[[Result], str]]
"""Figures of a cell by their names."""


def _measures(rows: list[Result]) -> Measures:
    is_large = max((_live(row) or 0 for row in rows), default=0) >= GIB
    unit, name, digits = (GIB, "GiB", 2) if is_large else (MIB, "MiB", 1)
    counted = any(DeviceKind.of(row.device).has_caching_allocator for row in rows)
    live = "`torch.cuda.max_memory_allocated`" if counted else "peak of live tensors"

    def figure(value: float | None, digits: int, unit: int = 1) -> str:
        return "n/a" if value is None else f"{value / unit:,.{digits}f}"

    return {
        f"{live}, {name}": lambda row: figure(_live(row), digits, unit),
        f"added resident memory, {name}": lambda row: figure(_resident(row), 1, unit),
        "samples a second": lambda row: figure(row.speed and _speed(row), 2) if row.had_cores else "busy",
        "loss of the last step": lambda row: figure(row.loss_last, 3),
    }


def _cell(measures: Measures, result: Result | None) -> str:
    if result is None:
        return "-"
    if result.status != "ok":
        return result.status.replace("_", " ")
    return " / ".join(figure(result) for figure in measures.values())


def _is_faster(one: Result, other: Result) -> bool:
    """Whether the slow steps of one take less than the fast ones of the other."""
    return bool(one.speed and other.speed and one.speed.step_seconds_q95 < other.speed.step_seconds_q05)


def _live(row: Result) -> int | None:
    return row.measured.allocated_bytes if row.measured and row.status == "ok" else None


def _resident(row: Result) -> int | None:
    return row.measured.rss_growth_bytes if row.measured and row.status == "ok" else None
