"""Sentences that generated pages put beside figures: why a row costs more than its peer, what is wrong with a commit.

They stand in `notes.yaml`, one place for all pages.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lightning_memfit.bench.record import Result

UNEXPLAINED = "Not explained yet."


@cache
def _notes() -> dict[str, Any]:
    notes: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
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
