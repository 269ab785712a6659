"""Pages as a browser lays them out: headless Chromium, without a network."""

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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


class Tab:
    """A page that is open in a browser, driven over the pipes of its developer protocol."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._number, self._session = to, os.fdopen(back, "rb", closefd=False), 0, ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            data = bytearray()
            while (byte := self._back.read(1)) != b"\0":
                assert byte, "the browser ended"
                data += byte
            answer = json.loads(data)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, width: int = 1100, dark: bool = False) -> None:
        """Open a file in a window of some width."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        source = "window.errors = []; addEventListener('error', e => errors.push(e.message));"
        source += "addEventListener('securitypolicyviolation', e => errors.push(e.blockedURI));"
        self._call("Page.enable")
        self._call("Page.addScriptToEvaluateOnNewDocument", source=source)
        self._call("Page.navigate", url=page.as_uri())
        done = f"new Promise(r => document.readyState === 'complete' && location.href === {json.dumps(page.as_uri())}"
        done += " ? r(true) : setTimeout(() => r(false), 50))"
        while not self.value(done):
            pass

    def value(self, expression: str) -> Any:
        """Value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Press, move or release the mouse's left button."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        box = f"(e => (e.scrollIntoView({{block: 'center'}}), e.getBoundingClientRect()))({self._found(selector)})"
        x, y = self.value(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def press(self, key: str, selector: str) -> None:
        """Press a key on an element."""
        self.value(f"{self._found(selector)}.focus()")
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    @staticmethod
    def _found(selector: str) -> str:
        return f"document.querySelector({json.dumps(selector)})"


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start a browser, end it afterwards.

    Args:
        folder: For the browser's profile.
    """
    assert CHROMIUM is not None
    (theirs, to), (back, their_end) = os.pipe(), os.pipe()

    def at_3_and_4() -> None:
        first, second = os.dup(theirs), os.dup(their_end)
        os.dup2(first, 3)
        os.dup2(second, 4)

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    options.append(f"--user-data-dir={folder / 'profile'}")
    process = subprocess.Popen(
        [CHROMIUM, *options],
        preexec_fn=at_3_and_4,
        close_fds=False,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(theirs)
    os.close(their_end)
    try:
        yield Tab(to, back)
    finally:
        process.terminate()
        process.wait(20)
        os.close(to)
        os.close(back)


def _meet(one: list[float], two: list[float], slack: float) -> bool:
    return one[0] < two[2] - slack and two[0] < one[2] - slack and one[1] < two[3] - slack and two[1] < one[3] - slack
