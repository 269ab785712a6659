"""Pages as a browser lays them out: headless Chromium, without a network."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Text is `text` in our own drawings and a group of paths in matplotlib's. Looks of titles within `text` don't count.
_LOOK = """
<script>
const errors = []; window.onerror = message => errors.push(String(message));
window.onload = () => {
  const box = element => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const svgs = [...document.querySelectorAll('svg')].map(svg => ({
    box: box(svg),
    texts: [...svg.querySelectorAll('text, g[id^="text_"]')].filter(e => !e.querySelector('g[id^="text_"]'))
      .map(e => ({text: (e.textContent || '').trim().slice(0, 60), box: box(e)})),
  }));
  const fetching = [...document.querySelectorAll('[src], link, image, iframe, object')];
  const sheets = [...document.styleSheets].map(s => s.href).filter(h => h);
  const found = {svgs, errors, width: document.documentElement.scrollWidth, room: window.innerWidth,
    height: document.documentElement.scrollHeight,
    loaded: fetching.map(e => e.src || e.href || e.data || e.tagName).concat(sheets)};
  const out = document.createElement('pre'); out.id = 'found'; out.textContent = JSON.stringify(found);
  document.body.appendChild(out);
};
</script>
"""


@dataclass(frozen=True)
class Layout:
    """What a page looks like."""

    svgs: list[dict[str, Any]]
    """Box of every drawing, and its texts with theirs, in pixels."""
    errors: list[str]
    width: int
    room: int
    height: int
    loaded: list[str]
    """Everything that the page asks for besides itself."""

    def overlaps(self, slack: float = 1.0) -> list[tuple[str, str]]:
        """Texts of one drawing that lie on one another."""
        found = []
        for svg in self.svgs:
            texts = svg["texts"]
            for index, one in enumerate(texts):
                found += [(one["text"], two["text"]) for two in texts[:index] if _meet(one["box"], two["box"], slack)]
        return found

    def outside(self, slack: float = 1.0) -> list[str]:
        """Texts that leave their drawing."""
        return [
            text["text"]
            for svg in self.svgs
            for text in svg["texts"]
            if text["box"][0] < svg["box"][0] - slack
            or text["box"][1] < svg["box"][1] - slack
            or text["box"][2] > svg["box"][2] + slack
            or text["box"][3] > svg["box"][3] + slack
        ]


def lay_out(page: Path, folder: Path, width: int = 1100) -> Layout:
    """Open a page and look at it.

    Args:
        page: HTML file.
        folder: For the browser's profile and a copy of the page.
        width: Of the window.
    """
    assert CHROMIUM is not None
    copy = folder / "page.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</title>", f"</title>{_LOOK}", 1), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    options += [f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom"]
    run = subprocess.run([CHROMIUM, *options, copy.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', run.stdout, re.S)
    assert found is not None, run.stderr[-500:]
    return Layout(**json.loads(unescape(found[1])))


def _meet(one: list[float], two: list[float], slack: float) -> bool:
    return one[0] < two[2] - slack and two[0] < one[2] - slack and one[1] < two[3] - slack and two[1] < one[3] - slack
