"""What the registry and the results say in the techniques' pages."""

import json
from pathlib import Path
from typing import Any

from benchmarks.marks import insert
from lightning_memfit.memory import MIB
from lightning_memfit.techniques.core.registry import TECHNIQUES
from lightning_memfit.techniques.core.technique import Technique

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "techniques"
RESULTS = ROOT / "benchmarks" / "results" / "techniques_cpu.json"


def render() -> dict[Path, str]:
    """Every page of a technique, and the table of all, as they should be."""
    document = json.loads(RESULTS.read_text())
    pages = {}
    for path in sorted({page_of(technique) for technique in TECHNIQUES}):
        own = [technique for technique in TECHNIQUES if page_of(technique) == path]
        pages[path] = insert(path.read_text(), "use", use(own))
    table = FOLDER / "README.md"
    pages[table] = insert(table.read_text(), "techniques", overview(document))
    return pages


def page_of(technique: Technique) -> Path:
    """The page that describes a technique."""
    return FOLDER / f"{technique.page or technique.name}.md"


def overview(document: dict[str, Any]) -> str:
    """Table over the registry, with what was measured beside the plain run."""
    rows = {row["name"]: row for row in document["rows"]}
    plain = rows["plain"]
    lines = ["| technique | decides | what it does | numbers | needs | peak | step |", "|---|---|---|---|---|---|---|"]
    for technique in TECHNIQUES:
        numbers = ", ".join(sorted(technique.numerics))
        lines.append(
            f"| [`{technique.name}`]({page_of(technique).name}) | {technique.kind} | {technique.summary} | {numbers} | "
            f"{technique.package} | {_against(rows.get(technique.name, {}), plain)} |"
        )
    batch, length = document["batch"]
    lines += [
        "",
        f"`peak` and `step` are the peak of live tensors and the processor time of a step, against the plain run's "
        f"{plain['measured_bytes'] / MIB:.1f} MiB and 100 %: GPT-2 of four blocks, {batch} x {length} bytes of text, "
        f"fp32 AdamW, {document['steps']} steps on one CPU core (torch {document['versions']['torch']}; "
        f"`{document['command']}`).",
    ]
    return "\n".join(lines)


def _against(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """Peak and time of a run as shares of the plain one's; empty where they weren't measured."""
    found = [
        f"{100 * row[name] / plain[name]:.0f} %" if name in row else "" for name in ("measured_bytes", "cpu_s_per_step")
    ]
    return " | ".join(found)


def use(techniques: list[Technique]) -> str:
    """What to write in Python: a block for one technique, a row each for several."""
    if len(techniques) == 1:
        imports = [f"from lightning_memfit import {spec.name}" for spec in techniques[0].callbacks]
        return "\n".join(["```python", *imports, "", f"Trainer({_arguments(techniques[0])})", "```"])
    lines = ["| `--with` | in Python |", "|---|---|"]
    lines += [f"| `{one.name}` | `Trainer({_arguments(one)})` |" for one in techniques]
    return "\n".join(lines)


def _arguments(technique: Technique) -> str:
    is_plugin = any(spec.is_precision for spec in technique.callbacks)
    arguments = [] if is_plugin else [f"{name}={value!r}" for name, value in technique.trainer.items()]
    calls = [
        f"{spec.name}({', '.join(f'{name}={value!r}' for name, value in spec.init_args.items())})"
        for spec in technique.callbacks
    ]
    if calls:
        arguments.append(f"{'plugins' if is_plugin else 'callbacks'}=[{', '.join(calls)}]")
    return ", ".join(arguments).replace("'", '"')
