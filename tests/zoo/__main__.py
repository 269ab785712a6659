"""Try every case of the zoo, and write the table of verdicts.

    python -m tests.zoo [--only NAME ...] [--theme NAME ...] [--processes N] [--write]

Each trial runs in a process of its own, in an empty folder, and is ended after its time. `--write` writes
`tests/zoo/verdicts.md`, which has nothing that differs from run to run, and the record of the docs' page of exactness.
What moves is a diff of that table; `python -m benchmarks.pages` makes the page.
"""

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tests.zoo import THEMES, compare
from tests.zoo.trial import Trial, is_met
from tests.zoo.trials import all_trials

TABLE = Path(__file__).parent / "verdicts.md"
Found = dict[str, tuple[str, dict[str, Any] | None]]
"""Verdicts, and rows for the page of exactness, by the key of a trial."""


def try_all(trials: Iterable[Trial], processes: int = 1, shown: bool = False) -> Found:
    """Run trials, each in a forked process, so many at once."""
    waiting, running, found = list(trials), {}, {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        while waiting or running:
            while waiting and len(running) < processes:
                trial = waiting.pop(0)
                own = Path(folder, str(len(waiting)))
                own.mkdir()
                running[_fork(trial, own)] = (trial, own, time.monotonic())
            for child, (trial, own, start) in list(running.items()):
                is_late = time.monotonic() - start > trial.seconds
                if is_late or os.waitpid(child, os.WNOHANG)[0]:
                    _end(child, is_late)
                    del running[child]
                    result = own / "result.json"
                    verdict, row = json.loads(result.read_text()) if result.exists() else ("ended", None)
                    found[trial.key] = ("did not end", None) if is_late else (verdict, row)
                    if shown:
                        mark = "" if is_met(trial.wanted, found[trial.key][0]) else f"   wanted: {trial.wanted}"
                        print(
                            f"{trial.key}: {found[trial.key][0]} ({time.monotonic() - start:.1f} s){mark}", flush=True
                        )
            time.sleep(0.02)
    return found


def _fork(trial: Trial, folder: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.chdir(folder)
        silent = os.open("output.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        warnings.simplefilter("ignore")
        gc.collect()  # what else this process has left must not close its descriptors in between
        try:
            result = trial.run()
        except BaseException as error:
            traceback.print_exc()
            result = f"crashed: {type(error).__name__}"
        kept = (result, None) if isinstance(result, str) else result
        Path(folder, "part.json").write_text(json.dumps(kept))
        os.rename(folder / "part.json", folder / "result.json")
    finally:
        os._exit(0)


def _end(child: int, is_late: bool) -> None:
    """End what a trial left running, and itself if it is late."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return
    if is_late:
        os.waitpid(child, 0)


def table(trials: Sequence[Trial], found: Found) -> str:
    """All verdicts, with a count for each theme."""
    lines = ["# Verdicts of the zoo", "", "`python -m tests.zoo --write` writes this file.", ""]
    themes = list(dict.fromkeys(trial.theme for trial in trials))
    lines += ["| theme | trials | met | not yet met |", "|---|---|---|---|"]
    for theme in themes:
        met = Counter(is_met(one.wanted, found[one.key][0]) for one in trials if one.theme == theme)
        lines.append(f"| {theme} | {met.total()} | {met[True]} | {met[False]} |")
    for theme in themes:
        lines += ["", f"## {theme[0].upper()}{theme[1:]}", "", "| case | tried | wanted | verdict | met | from |"]
        lines.append("|---|---|---|---|---|---|")
        lines += [_row(one, found[one.key][0]) for one in trials if one.theme == theme]
    return "\n".join(lines) + "\n"


def read_table() -> dict[str, str]:
    """The verdicts of the written table, by the key of a trial."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.count(" | ") == 5]
    return {f"{row[1]}: {row[0]}": row[3] for row in rows if row[0] != "case"}


def _row(trial: Trial, verdict: str) -> str:
    met = "met" if is_met(trial.wanted, verdict) else "not yet met"
    return f"| {trial.case} | {trial.tried} | {trial.wanted} | {verdict} | {met} | {trial.source} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of cases")
    parser.add_argument("--theme", nargs="+", metavar="NAME", help="themes of cases")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="trials at once, by default 1")
    parser.add_argument("--write", action="store_true", help="write the table; only with every case")
    chosen = parser.parse_args(arguments)
    trials = all_trials()
    for option, known in (("only", {one.case for one in trials}), ("theme", {one.theme for one in trials})):
        for name in set(getattr(chosen, option) or ()) - known:
            near = get_close_matches(name, known) or sorted(known)[:5]
            parser.error(f"--{option}: there is no {name!r}. Did you mean {', '.join(near)}?")
    wanted = [
        one
        for one in trials
        if (chosen.only is None or one.case in chosen.only) and (chosen.theme is None or one.theme in chosen.theme)
    ]
    if chosen.write and len(wanted) < len(trials):
        parser.error("--write needs every case: leave out --only and --theme.")
    start = time.monotonic()
    found = try_all(wanted, chosen.processes, shown=True)
    met = sum(is_met(one.wanted, found[one.key][0]) for one in wanted)
    print(f"{met} of {len(wanted)} met, {time.monotonic() - start:.0f} s")
    if chosen.write:
        TABLE.write_text(table(trials, found))
        rows = [found[one.key][1] for one in trials if one.theme in THEMES]
        compare.write_page([row for row in rows if row])


if __name__ == "__main__":
    main()
