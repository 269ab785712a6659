"""`render_plan`: the settings of a search as one HTML page that needs nothing else, to compare them at any limit."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_memfit.estimate.page import render_page
from lightning_memfit.estimate.timeline import COLOURS, DRAWING_STYLE
from lightning_memfit.planner.tried import Explored

_SCRIPT = Path(__file__).with_suffix(".js")

_STYLE = """
h2 { font-size: 16px; margin: 22px 0 6px; } h3 { font-size: 15px; margin: 0 0 4px; overflow-wrap: anywhere; }
.front { fill: none; stroke: var(--soft); stroke-width: 1.5; } .dot { cursor: pointer; }
.dot.exact { fill: #0072B2; } .dot.lossy { fill: #E69F00; stroke: var(--ink); stroke-width: .6; }
.dot.over { opacity: .35; } .ring { fill: none; stroke: var(--ink); stroke-width: 2; pointer-events: none; }
.ring.best { stroke: #009E73; stroke-width: 2.5; } .knob { fill: var(--ink); } .grip { fill: transparent; }
#limit { cursor: ew-resize; touch-action: none; } :focus-visible { outline: 2px solid #56B4E9; outline-offset: 2px; }
.exactly i, .lossily i { border-radius: 50%; } .exactly i { background: #0072B2; }
.lossily i { background: #E69F00; } #sizes button { margin: 0 6px 6px 0; }
button { font: inherit; padding: 5px 11px; color: var(--ink); background: var(--paper); border: 1px solid var(--soft);
  border-radius: 5px; cursor: pointer; } button[aria-pressed=true] { background: var(--ink); color: var(--paper); }
#best { border-left: 4px solid #009E73; padding: 2px 0 2px 12px; overflow-wrap: anywhere; min-height: 130px; }
fieldset { border: 1px solid var(--grid); margin: 0 0 10px; } label { display: inline-block; margin-right: 16px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } th { font-weight: normal; text-align: left; }
th, td { padding: 2px 12px 2px 0; vertical-align: top; overflow-wrap: anywhere; }
th i { display: inline-block; width: 12px; height: 12px; margin-right: 7px; }
textarea { box-sizing: border-box; width: 100%; height: 260px; font: 13px ui-monospace, monospace; color: var(--ink);
  background: var(--paper); border: 1px solid var(--grid); } [hidden] { display: none; }
"""

_BODY = """
<p>Every dot is a complete setting: techniques, micro-batch and checkpointing of every block. Dots are drawn for the
combinations that the search's traces allow to work out: at every micro-batch the plan that needs least, and the fastest
within each of the sizes below. Left and low is better; the line is the Pareto front of the dots shown. Memory is what
the device must have, with fragmentation and runtime. Times are those of the device that was planned for, whatever the
limit. For the other combinations only bounds are known: at the size that was planned for, none of them is better.</p>
<div id="sizes" role="group" aria-label="Size of the device"></div>
<svg id="chart" tabindex="0" role="group" aria-label="Memory against time. Arrow keys choose a setting."></svg>
<ul><li class="exactly"><i></i>keeps the recipe's numbers</li><li class="lossily"><i></i>changes them</li>
<li>pale: over the limit</li><li>ring: chosen; green ring: best at the limit</li></ul>
<div id="best" aria-live="polite"></div>
<h2>Filters</h2>
<fieldset><legend>What may change in the recipe's numbers</legend><div id="changes"></div></fieldset>
<fieldset><legend>Techniques that may be used</legend><div id="techniques"></div></fieldset>
<section id="chosen"><h2>The chosen setting</h2><h3 id="label"></h3><p id="facts"></p>
<h2>Memory at the peak</h2><table><tbody id="breakdown"></tbody></table>
<h2>Overlay</h2><p>Save it as a file, and train: <code>memfit fit --config RECIPE --config FILE</code>.</p>
<textarea id="yaml" readonly aria-label="Overlay of the chosen setting" spellcheck="false"></textarea>
<button id="copy">Copy</button> <span id="copied" role="status"></span></section>
"""


def render_plan(plan: Mapping[str, Any], explored: Explored, overlays: Sequence[str]) -> str:
    """The page as text. Loads nothing: its policy forbids every request, and every script but its own."""
    length = plan["sequence_length"]
    limits = explored.limits
    dots = []
    for one, overlay in zip(explored.tried, overlays, strict=True):
        data = one.plan.to_dict()
        is_plan = data["setting"] == plan["setting"]
        wanted = (i for i, limit in enumerate(limits) if data["needed_bytes"] <= limit.usable_bytes)
        dots.append(
            {
                **{name: data[name] for name in ("label", "needed_bytes", "peak_bytes", "seconds_per_step")},
                **{name: data[name] for name in ("breakdown", "changes")},
                "per_s": data["tokens_per_s"] if length else data["samples_per_s"],
                "techniques": list(data["setting"]["techniques"]),
                "is_plan": is_plan,
                "from": explored.planned if is_plan else next(wanted, len(limits)),
                "combination": one.combination,
                "weight": one.weight,
                "rank": one.rank,
                "yaml": overlay,
            }
        )
    content = {
        "plan": plan,
        "tried": dots,
        "limits": [vars(limit) for limit in limits],
        "planned": explored.planned,
        "yields": explored.yields,
        "tie": explored.tie,
        "unit": "tokens" if length else "samples",
        "colours": {str(category): colour for category, colour in COLOURS.items()},
    }
    title = f"Settings for {plan['model']} on {plan['device']}"
    body = f"<p>{html.escape(plan['summary'])}</p>\n{_BODY}"
    return render_page(title, body, DRAWING_STYLE + _STYLE, content, _SCRIPT.read_text(encoding="utf-8"))
