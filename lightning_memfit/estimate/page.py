"""`render_page`: the frame of every HTML page that this package writes. A page is one file, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5b5b5b; --paper: #ffffff; --grid: #d8d8d8;
  --band: #00000009; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --soft: #ababab; --paper: #17181a; --grid: #3a3c40; --band: #ffffff0d; }
}
body { margin: 24px auto; max-width: 1120px; padding: 0 12px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 4px; } p { margin: 0 0 10px; color: var(--soft); }
"""


def render_page(title: str, body: str, style: str = "", data: Any = None, script: str = "") -> str:
    """The page as text. Its policy forbids every request, and every script but its own.

    Args:
        title: Title and heading, as plain text.
        body: HTML below the heading. What comes from users must be escaped in it.
        style: CSS beside the common one, which has the colours `--ink`, `--soft`, `--paper`, `--grid` and `--band` for
            light and dark.
        data: What the script reads from the element `data`, ready for JSON; None if it reads nothing.
        script: JavaScript that runs when the page is there.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    embedded = ""
    if data is not None:
        # Within `script` only `<` could end the element or begin a comment.
        text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        embedded = f'<script type="application/json" id="data">{text}</script>\n'
    if script:
        known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{known}'"
        embedded += f"<script>{script}</script>"
    heading = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
        f'<title>{heading}</title>\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{_STYLE}{style}</style>\n<h1>{heading}</h1>\n{body}{embedded}</html>\n"
    )
