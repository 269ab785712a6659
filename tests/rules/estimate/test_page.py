"""The frame of every HTML page: nothing that users wrote ends an element, and nothing but its own script runs."""

import base64
import hashlib
import json
import re
from pathlib import Path

import lightning_memfit
from lightning_memfit.estimate.page import render_page

PAYLOAD = "</title></script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"
PACKAGE = Path(lightning_memfit.__file__).parent


def test_title_and_data_are_text() -> None:
    page = render_page(PAYLOAD, "<p>body</p>", data={PAYLOAD: [PAYLOAD, 1]}, script="run()")
    assert PAYLOAD not in page
    assert page.count("<script") == 2
    assert "<!--" not in page
    assert "<img" not in page
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert json.loads(text) == {PAYLOAD: [PAYLOAD, 1]}


def test_the_policy_names_the_script_and_nothing_else() -> None:
    script = "const a = 1 < 2;\n"
    page = render_page("t", "", script=script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert f"<script>{script}</script>" in page


def test_a_page_without_a_script_allows_none() -> None:
    page = render_page("t", "<p>body</p>", style="p { color: red; }")
    assert "<script" not in page
    assert "script-src" not in page
    assert "default-src 'none'" in page
    assert page.index("prefers-color-scheme: dark") < page.index("p { color: red; }") < page.index("<h1>t</h1>")


def test_every_page_has_this_frame() -> None:
    writers = [path.name for path in PACKAGE.rglob("*.py") if "<!doctype" in path.read_text(encoding="utf-8").lower()]
    assert writers == ["page.py"]
