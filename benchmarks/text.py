"""Text that scripts write into pages: tables, text between marks, short words, and each sentence once."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def insert(page: str, mark: str, text: str) -> str:
    """Put text between the page's marks of that name.

    Raises:
        ValueError: If the page doesn't have both marks, once.
    """
    begin, end = f"<!-- begin: {mark} -->", f"<!-- end: {mark} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"`page` needs {begin!r} and {end!r} once each: write them where the text belongs.")
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A table of Markdown, the last `right` columns of which are aligned to the right."""
    rule = "|---" * (len(head) - right) + "|---:" * right + "|"
    first = f"| {' | '.join(head)} |".replace("  ", " ")
    return "\n".join([first, rule, *(f"| {' | '.join(cells)} |" for cells in rows)])


def shortened(text: str, most: int = 160) -> str:
    """Text on one line that a cell of a table can hold, cut at a word's end after that many characters."""
    text = " ".join(text.split()).replace("|", "/").replace("<", "&lt;")
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " ..."


def by_words(found: Iterable[tuple[str, str, str]], most: int = 90, counted: bool = False) -> list[str]:
    """Items of a list: each verdict and its words once, with the names of all that got them.

    Words that differ in numbers alone count as the same; the first ones are shown.

    Args:
        found: Verdict, words and name of each.
        most: Characters of the words that are shown.
        counted: Whether to say how many got them instead of naming them.
    """
    items: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for verdict, words, name in found:
        words = re.sub(r"^(\w+(Exception|Error)|Refusal): ", "", words)
        key = re.sub(r"[\d.,]+( [KMG]?i?B)?", "#", f"{verdict}{shortened(words, most)}")
        items.setdefault(key, f"{verdict}: {shortened(words, most)}")
        names.setdefault(key, []).append(name)
    return [f"- {item} ({len(names[key]) if counted else ', '.join(names[key])})" for key, item in items.items()]
