"""Text that scripts write into pages: between marks, and short enough for the cell of a table."""


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


def shortened(text: str, most: int = 160) -> str:
    """Text on one line that a cell of a table can hold, cut at a word's end after that many characters."""
    text = " ".join(text.split()).replace("|", "/").replace("<", "&lt;")
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " ..."
