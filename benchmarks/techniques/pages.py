"""What the registry and the results say in the techniques' pages."""

import json
from pathlib import Path
from typing import Any

import yaml

import lightning_memfit
from benchmarks.marks import insert
from lightning_memfit.memory import MIB
from lightning_memfit.techniques.core.registry import TECHNIQUES
from lightning_memfit.techniques.core.technique import CallbackSpec, Technique

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "techniques"
RESULTS = ROOT / "benchmarks" / "results" / "techniques_cpu.json"


def render() -> dict[Path, str]:
    """Every page of a technique, and the table of all, as they should be."""
    document = json.loads(RESULTS.read_text())
    pages = {}
    for path in sorted({page_of(technique) for technique in TECHNIQUES}):
        own = [technique for technique in TECHNIQUES if page_of(technique) == path]
        page = insert(path.read_text(), "use", use(own))
        pages[path] = insert(page, "measured", measured(own, document))
    table = FOLDER / "README.md"
    pages[table] = insert(table.read_text(), "techniques", overview())
    return pages


def page_of(technique: Technique) -> Path:
    """The page that describes a technique."""
    return FOLDER / f"{technique.page or technique.name}.md"


def overview() -> str:
    """Table over the registry."""
    lines = ["| technique | decides | what it does | numbers | needs |", "|---|---|---|---|---|"]
    for technique in TECHNIQUES:
        numbers = ", ".join(sorted(technique.numerics))
        lines.append(
            f"| [`{technique.name}`]({page_of(technique).name}) | {technique.kind} | {technique.summary} | {numbers} | "
            f"{technique.package} |"
        )
    return "\n".join(lines)


def use(techniques: list[Technique]) -> str:
    """One line of Python and YAML each."""
    parts = []
    for technique in techniques:
        title = f"`{technique.name}`: {technique.summary}.\n\n" if len(techniques) > 1 else ""
        config = yaml.safe_dump(technique.config(), sort_keys=False, default_flow_style=None, width=110)
        parts.append(f"{title}```python\n{_python(technique)}\n```\n```yaml\n{config}```\n")
    return "\n".join(parts)


_WIDTH = 120
"""Longest line of the formatter."""


def _python(technique: Technique) -> str:
    imports = [_import(spec) for spec in technique.callbacks]
    is_plugin = any(spec.is_precision for spec in technique.callbacks)
    arguments = [] if is_plugin else [f"{name}={value!r}" for name, value in technique.trainer.items()]
    calls = [
        f"{spec.name}({', '.join(f'{name}={value!r}' for name, value in spec.init_args.items())})"
        for spec in technique.callbacks
    ]
    if calls:
        arguments.append(f"{'plugins' if is_plugin else 'callbacks'}=[{', '.join(calls)}]")
    call = f"Trainer({', '.join(arguments)})"
    if len(call) > _WIDTH:
        call = "\n".join(["Trainer(", "    callbacks=[", *(f"        {one}," for one in calls), "    ]", ")"])
    return "\n".join([*imports, *([""] if imports else []), call.replace("'", '"')])


def _import(spec: CallbackSpec) -> str:
    public = spec.name in lightning_memfit.__all__
    return f"from {'lightning_memfit' if public else spec.class_path.rpartition('.')[0]} import {spec.name}"


def measured(techniques: list[Technique], document: dict[str, Any]) -> str:
    """Figures of the techniques beside the plain run's."""
    rows = {row["name"]: row for row in document["rows"]}
    plain = rows["plain"]
    names = [technique.name for technique in techniques]
    own = [row for row in document["rows"] if row["name"].partition(",")[0] in names]
    batch, length = document["batch"]
    lines = [
        f"GPT-2 of four blocks, {batch} x {length} bytes of text, fp32 AdamW otherwise, {document['steps']} steps on "
        f"one CPU core (torch {document['versions']['torch']}; `{document['command']}`). Peaks are live tensors.",
        "",
        "| | predicted peak | measured peak | against plain | processor time of a step |",
        "|---|---|---|---|---|",
        _row("plain run", plain, plain),
        *(_row(f"`{row['name']}`", row, plain) for row in own),
    ]
    return "\n".join(lines)


def _row(name: str, row: dict[str, Any], plain: dict[str, Any]) -> str:
    if "refused" in row:
        reason = row["refused"].partition(": ")[2]
        return f"| {name} | not measured: {reason} | | | |"
    seconds = row["cpu_s_per_step"] / plain["cpu_s_per_step"]
    peaks = "| not traced | |"
    if "measured_bytes" in row:
        share = row["measured_bytes"] / plain["measured_bytes"]
        peaks = f"| {_mib(row['predicted_bytes'])} | {_mib(row['measured_bytes'])} | {100 * share:.0f} %"
    return f"| {name} {peaks} | {100 * seconds:.0f} % |"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB"
