"""One trial of the zoo: a case, the public name that is tried on it, what is wanted, and how to find out.

Verdicts, and what is wanted, are short words that neither a version nor a machine changes:

- `exact`: weights, buffers, optimizer states and logged values are those of plain training
- `refused`: an error of ours ended the run before it changed anything
- `accepted`: the run ended well, and its random numbers can't be compared
- `peak`: the predicted peak is that of a plain run
- `crashed`, `WRONG`, `ended`, `did not end`: none of these is ever wanted
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.zoo.compare import is_refusal

NEVER = ("WRONG", "crashed", "ended", "did not end")


@dataclass(frozen=True)
class Trial:
    """A row of the table.

    Attributes:
        case: Name of the case.
        theme: What it belongs to, for `--theme`.
        tried: The public name that is tried.
        wanted: Words that the verdict has to have, with ` or ` between alternatives.
        source: The test or the report that the case comes from.
        run: Makes the verdict, in a process of its own; with a row for the page of exactness, if it has one.
        seconds: When the process is ended.
    """

    case: str
    theme: str
    tried: str
    wanted: str
    source: str
    run: Callable[[], str | tuple[str, dict[str, Any]]]
    seconds: float = 180.0

    @property
    def key(self) -> str:
        """What tells it from every other trial."""
        return f"{self.tried}: {self.case}"


def is_met(wanted: str, verdict: str) -> bool:
    """Whether a verdict is what is wanted. What stands behind a semicolon is a remark."""
    words = verdict.split(";")[0].replace("refused later", "refused").split(", ")
    is_bad = any(word.split(":")[0].split(" ")[-1] in NEVER or word in NEVER for word in words)
    return not is_bad and any(set(way.split(", ")) <= set(words) for way in wanted.split(" or "))


def outcome(act: Callable[[], Any], good: str) -> str:
    """How a call ends: well, refused, or by another error."""
    try:
        act()
    except BaseException as error:
        return "refused" if is_refusal(error) else f"crashed: {type(error).__name__}"
    return good
