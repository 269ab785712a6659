"""What mkdocs does beside its own work: pages of the repository's root become pages of the site, and links are mended.

The README is the first page. Links to files that the site doesn't have, such as results of benchmarks, become their
path; pictures among them are copied.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the root, and the pages that they become."""

_PICTURES = (".png", ".svg", ".html")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend the links of a page outside of fenced code."""
    source = next((name for name, made in PAGES.items() if made == page.file.src_uri), f"docs/{page.file.src_uri}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda found: _mended(found, source, config, files), part)
        for part in parts
    )


def _mended(link: re.Match[str], source: str, config: Any, files: Any) -> str:
    mark, text, address = link.groups()
    path, _, anchor = address.partition("#")
    if not path or "://" in path:
        return link[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / target).exists():
        return link[0]  # which the strict build then refuses
    here = PAGES.get(source) or source.removeprefix("docs/")
    inside = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
    if inside is None and target.endswith(_PICTURES):
        inside = f"assets/{target}"
        if files.get_file_from_path(inside) is None:
            files.append(File.generated(config, inside, abs_src_path=str(ROOT / target)))
    if inside is not None and (ROOT / target).is_dir():
        inside += "/README.md"
    if inside is None:
        return f"{text} (`{target}`)" if target not in text else f"`{target}`"
    relative = posixpath.relpath(inside, posixpath.dirname(here) or ".")
    return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"
