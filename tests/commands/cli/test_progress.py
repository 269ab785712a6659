import io

import pytest

from cli.progress import ProgressLine
from lightning_memfit.planner.search import Search, Working
from tests.rules.planner.made import MadeTraceStore, made_workload


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


WORKING = Working("forward and backward of bf16_mixed", 3, 12, "fused_adamw, micro-batch 4 x 2, 1.2 s per step")


def test_a_pipe_gets_a_line_every_few_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressLine("planning", stream, clock) as line:
        for clock.seconds in (2.5, 3.0, 4.0, 7.6, 8.0):
            line(WORKING)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == (
        "memfit: planning for 2 s: tracing forward and backward of bf16_mixed (trace 3), 12 combinations left, "
        "best so far: fused_adamw, micro-batch 4 x 2, 1.2 s per step"
    )


def test_a_terminal_gets_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal(), Clock()
    with ProgressLine("planning", stream, clock) as line:
        for clock.seconds in (3.0, 3.1):
            line(WORKING)
    assert "12 combinations left" in stream.getvalue()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[2K")  # erased


def test_an_estimate_says_at_once_what_it_traces() -> None:
    """It said nothing for the 60 s of a trace."""
    stream = io.StringIO()
    with ProgressLine("estimating", stream) as line:
        line.tell("tracing a step of Net")
    assert stream.getvalue() == "memfit: estimating: tracing a step of Net\n"
    with ProgressLine("estimating", stream, is_quiet=True) as line:
        line.tell("something else")
    assert "else" not in stream.getvalue()


def test_a_search_says_what_it_traces_and_finds() -> None:
    said: list[str] = []
    found = Search(MadeTraceStore(made_workload(1000)), lambda working: said.append(working.words()))  # type: ignore[arg-type]
    best = found.run().best
    assert best is not None
    assert "none checked yet" in said[0]
    assert f"{best.time.total:.3g} s per step" in said[-1]
    found.store.on_trace("the whole")
    assert "tracing the whole (trace 1)" in said[-1]
