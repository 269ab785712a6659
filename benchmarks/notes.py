"""Sentences that generated pages put beside figures: why a row costs more than its peer, what is wrong with a commit.

They stand in `notes.yaml`, one place for all pages.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

UNEXPLAINED = "Not explained yet."


@cache
def _notes() -> dict[str, Any]:
    notes: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return notes


def reason(page: str, row: str) -> str:
    """Why a row of a page is slower than what it is compared with."""
    return str(_notes()["reasons"].get(page, {}).get(row, UNEXPLAINED))


def faults(commits: set[str]) -> list[str]:
    """What is known to be wrong with the commits at which records were made.

    Args:
        commits: Whole names, which may end with `-dirty`.
    """
    return [note for name, note in _notes()["faults"].items() if any(commit.startswith(name) for commit in commits)]


def pages() -> dict[str, set[str]]:
    """Rows that have a reason, by page."""
    return {page: set(rows) for page, rows in _notes()["reasons"].items()}
