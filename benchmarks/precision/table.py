"""Final losses by precision."""

from typing import Any

from benchmarks.marks import RESULTS as FOLDER

RESULTS = FOLDER / "precision_final_loss.json"


def render(document: dict[str, Any]) -> str:
    """The table as Markdown, with what it says above it."""
    rows = document["rows"]
    rates = list(dict.fromkeys(row["learning_rate"] for row in rows))
    techniques = list(dict.fromkeys(row["technique"] for row in rows))[1:]  # the first is what is compared with
    mean = {(row["technique"], row["learning_rate"]): row["mean_percent_above_float32"] for row in rows}
    config = document["config"]
    return "\n".join(
        [
            f"Validation loss after {document['steps']} steps of a GPT-2 with {config['n_layer']} blocks of width "
            f"{config['n_embd']} on the quickstart's",
            f"text, mean of {document['seeds']} seeds, against float32 AdamW from the same weights",
            f"(`benchmarks/results/{RESULTS.name}`, by `{document['command']}`):",
            "",
            "| | " + " | ".join(f"learning rate {rate:g}" for rate in rates) + " |",
            "|---" * (len(rates) + 1) + "|",
            *(
                f"| {technique} | " + " | ".join(f"{mean[technique, rate]:+.3f} %" for rate in rates) + " |"
                for technique in techniques
            ),
        ]
    )
