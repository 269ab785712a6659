"""The documentation site: every page and public name is in it, and it loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import lightning_memfit
from tests.helpers.browser import CHROMIUM, browser

from . import tutorial_notebook

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
MADE_OF_THE_ROOT = {"index.md", "changelog.md", "contributing.md"}


class _Loader(yaml.SafeLoader):
    """Reads mkdocs' tags as nothing."""


_Loader.add_multi_constructor("!", lambda *_: None)


def in_navigation(entry):
    if isinstance(entry, str):
        yield entry
    else:
        for child in entry.values() if isinstance(entry, dict) else entry:
            yield from in_navigation(child)


def configuration():
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def named_in_reference():
    return re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md")), re.M)


def test_every_page_is_in_the_navigation_once():
    pages = list(in_navigation(configuration()["nav"]))
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(pages) == sorted(there | MADE_OF_THE_ROOT)


def test_every_public_name_is_in_the_reference_once():
    ours = [name.removeprefix("lightning_memfit.") for name in named_in_reference()]
    public = set(lightning_memfit.__all__) - {"__version__"}
    assert len(ours) == len(set(ours))
    assert {name for name in ours if "." not in name} == public
    assert "`lightning_memfit.__version__`" in (DOCS / "api" / "README.md").read_text()


def test_what_else_is_in_the_reference_is_what_public_names_give_and_take():
    for path in named_in_reference():
        folder, _, name = path.rpartition(".")
        assert getattr(import_module(folder), name).__doc__


def test_links_between_pages_lead_to_files():
    for page in (*DOCS.rglob("*.md"), *ROOT.glob("*.md")):
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
        for address in re.findall(r"\]\(([^)\s#]+)", text):
            if "://" not in address:
                assert (page.parent / address).exists(), f"{page}: {address}"


def test_the_notebook_is_the_tutorial():
    nbformat = pytest.importorskip("nbformat")
    kept, made = nbformat.read(tutorial_notebook.NOTEBOOK, 4), tutorial_notebook.notebook()
    nbformat.validate(kept)
    assert [(cell.cell_type, cell.source) for cell in kept.cells] == [(c.cell_type, c.source) for c in made.cells]
    assert tutorial_notebook.NOTEBOOK.stat().st_size < 40_000


def test_the_tutorial_shows_what_its_estimates_print(tmp_path, monkeypatch, capsys):
    """All but the training, which takes minutes: `make docs` runs that in the notebook."""
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code, shown in tutorial_notebook.code_and_output():
        if "trainer.fit" in code:
            break
        exec(compile(code, "tutorial.md", "exec"), namespace)
        assert capsys.readouterr().out == (shown or "")
    else:
        pytest.fail("The tutorial trains nothing.")


def printed_text(output):
    """What a cell printed; tables of rich are shown by data of their own in a notebook."""
    return output.get("text") or output.get("data", {}).get("text/plain", "")


def outputs(made):
    return ["".join(map(printed_text, cell.outputs)) for cell in made.cells if cell.cell_type == "code"]


def assert_shown(printed):
    """The page shows what the cells printed, and the report's peaks."""
    shown = [output for _, output in tutorial_notebook.code_and_output()]
    assert any(shown)
    for expected, found in zip(shown, printed, strict=True):
        assert not expected or found == expected
    peaks = re.search(r"peak of live tensors\s*│\s*([\d.]+) MiB │\s*([\d.]+) MiB", printed[-2])
    assert "160.00 MiB" in printed[-2]
    text = f"prints the\npredicted peak beside the measured one at the end: {float(peaks[1]):.1f} MiB both times"
    assert text in tutorial_notebook.PAGE.read_text()
    assert f"{float(peaks[2]):.1f}" == f"{float(peaks[1]):.1f}"


def test_the_kept_notebook_has_the_tutorials_outputs():
    nbformat = pytest.importorskip("nbformat")
    assert_shown(outputs(nbformat.read(tutorial_notebook.NOTEBOOK, 4)))


@pytest.mark.skipif("MEMFIT_NOTEBOOK" not in os.environ, reason="starts a Jupyter kernel; `make docs` does")
def test_the_notebook_runs_and_the_tutorial_shows_what_it_prints(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    assert_shown(outputs(tutorial_notebook.executed(tutorial_notebook.notebook(), tmp_path)))


class _Loads(HTMLParser):
    """Notes what a browser fetches to show a page, and the page's anchors."""

    def __init__(self):
        super().__init__()
        self.fetched, self.anchors = [], set()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors.add(found.get("id"))
        is_shown = tag != "link" or found.get("rel") in ("stylesheet", "icon", "preload", "preconnect")
        name = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}.get(tag)
        if name and found.get(name) and is_shown:
            self.fetched.append(found[name])


def test_the_site_is_built_without_warnings_and_is_whole_in_itself(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    anchors = set()
    # A server shows 404.html in the place of any page, so that its links begin at the root.
    pages = [page for page in (tmp_path / "site").rglob("*.html") if page.name != "404.html"]
    for page in (page for page in pages if "assets" not in page.parts):
        read = _Loads()
        read.feed(page.read_text())
        anchors |= read.anchors
        for address in read.fetched:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
            assert (page.parent / address.partition("?")[0].partition("#")[0]).exists(), f"{page}: {address}"
    if CHROMIUM is not None:
        with browser(tmp_path) as tab:
            for page in pages:
                tab.open(page, width=480)
                assert tab.value("document.documentElement.scrollWidth <= innerWidth"), f"{page} is too wide"
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style.read_text()), style
    public = {f"lightning_memfit.{name}" for name in lightning_memfit.__all__} - {"lightning_memfit.__version__"}
    assert public <= anchors
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()
