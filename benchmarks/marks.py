"""Text that scripts write into pages, between marks."""


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
