"""Which line an error that stopped a trace comes from, and whether it is the module's own."""

import linecache
import sysconfig
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_MACHINERY = tuple(
    folder
    for name in ("torch", "lightning", "lightning_memfit")
    if (spec := find_spec(name)) is not None  # finding them imports none of them
    for folder in spec.submodule_search_locations or ()
)
"""Where the trace itself runs: what is raised there may come from fake tensors."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {"<"})


@dataclass(frozen=True)
class Culprit:
    """Where an error comes from."""

    place: str
    """The last line of the user's own code, or else of the library that the module comes from; empty if none ran."""
    is_own: bool
    """Whether code outside of torch, Lightning and this package raised the error, as it will in training."""

    @classmethod
    def of(cls, error: BaseException) -> "Culprit":
        """Read the traceback of an error."""
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
        # The user's code is what lies nowhere in the installation; else that of a library such as transformers counts.
        users = [frame for frame in theirs if not frame.filename.startswith(_LIBRARIES)]
        found = (users or [frame for frame in theirs if not _is_standard(frame.filename)])[-1:]
        return cls("".join(map(_words, found)), bool(found) and frames[-1] is theirs[-1])


def _is_standard(filename: str) -> bool:
    library = sysconfig.get_path("stdlib")
    return filename.startswith("<") or (filename.startswith(library) and "site-packages" not in filename)


def _words(frame: traceback.FrameSummary) -> str:
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    shown = f": `{line}`" if line else ""
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}{shown}"
