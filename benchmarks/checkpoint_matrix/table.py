"""Write the matrix of checkpoints into its page: `python -m benchmarks.checkpoint_matrix.table`."""

import json
from collections import defaultdict
from typing import Any

from benchmarks.checkpoint_matrix.cells import KINDS
from benchmarks.checkpoint_matrix.run import RESULTS, ROOT
from benchmarks.marks import insert, shortened

PAGE = ROOT / "docs" / "guides" / "multi_gpu.md"
MARK = "checkpoint_matrix"
TITLES = {
    "single": "one device",
    "ddp": "DDP",
    "fsdp2": "FSDP2, shards",
    "fsdp2_file": "FSDP2, one file",
    "tensor_parallel": "tensor parallel",
    "zero_1": "ZeRO-1",
    "zero_2": "ZeRO-2",
    "zero_3": "ZeRO-3",
    "zero_offload": "ZeRO offload",
    "zero_infinity": "Infinity",
}


def render(document: dict[str, Any]) -> str:
    """How many cells of each pair of strategies were exact, and what happened in others."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in document["rows"]:
        cells[row["source"]["kind"], row["target"]["kind"]].append(row)
    lines = [
        f"{len(document['rows'])} runs on the CPU (`benchmarks/results/{RESULTS.name}`, by `{document['command']}`): a",
        "run on 1 to 4 ranks saves, another on 1 to 4 ranks goes on. AdamW, and SGD with momentum, three groups out",
        "of the module's order, tied embeddings, and with SGD a parameter without dimensions, which FSDP2 refuses. A",
        "number says how many runs of a pair were exact: weights and states equal bit for bit, next losses equal to",
        "2e-5.",
        "",
        "| from, down; to, across | " + " | ".join(TITLES[kind] for kind in KINDS) + " |",
        "|---" * (len(KINDS) + 1) + "|",
    ]
    remarks = []
    for source in KINDS:
        entries = []
        for target in KINDS:
            rows = cells[source, target]
            exact = sum(row["verdict"] == "exact" for row in rows)
            entries.append(str(exact) if exact == len(rows) else f"{exact} of {len(rows)}")
            remarks += [row for row in rows if row["verdict"] != "exact"]
        lines.append(f"| {TITLES[source]} | " + " | ".join(entries) + " |")
    for row in remarks:
        ends = " to ".join(f"{TITLES[row[end]['kind']]} on {row[end]['world_size']}" for end in ("source", "target"))
        lines.append(f"\n{ends}: {row['verdict']}, {shortened(row.get('words') or str(row.get('different')))}")
    return "\n".join(lines)


def main() -> None:
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), MARK, render(document)), encoding="utf-8")


if __name__ == "__main__":
    main()
