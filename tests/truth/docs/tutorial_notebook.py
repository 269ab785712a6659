"""The tutorial as a notebook: `python -m tests.truth.docs.tutorial_notebook` writes docs/tutorial.ipynb.


It runs the page, the source of both: Python blocks become cells, what stands under them as text is left to the run.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.S | re.M)


def code_and_output() -> list[tuple[str, str | None]]:
    """The page's Python blocks, each with the output that the page shows, if any."""
    return [(code, shown) for code, shown in _BLOCK.findall(PAGE.read_text(encoding="utf-8"))]


def notebook() -> Any:
    """The page as a notebook without outputs."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    text = PAGE.read_text(encoding="utf-8")
    text = text.replace(f"the same page is a\n[notebook]({NOTEBOOK.name})", f"the same text is a\n[page]({PAGE.name})")
    cells, end = [], 0
    for found in _BLOCK.finditer(text):
        cells += [new_markdown_cell(text[end : found.start()].strip()), new_code_cell(found[1].strip())]
        end = found.end()
    cells.append(new_markdown_cell(text[end:].strip()))
    cells = [cell for cell in cells if cell.source]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return new_notebook(cells=cells, metadata=kernel)


def executed(made: Any, folder: Path) -> Any:
    """Run all cells of a notebook, in a folder, and return it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(folder)}}
    options = {"timeout": 240, "startup_timeout": 240, "record_timing": False}
    with tempfile.TemporaryDirectory(prefix="memfit-") as sockets:  # no port is opened; names of sockets are short
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        NotebookClient(made, manager, resources=resources, **options).execute()
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    made.metadata.pop("language_info", None)
    return made


def main() -> int:
    """Write the notebook."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(notebook(), Path(folder)), NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
