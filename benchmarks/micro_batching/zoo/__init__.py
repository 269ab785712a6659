"""More than a hundred small modules with their data: what micro-batches must leave exact or refuse.

`THEMES` has the cases of each file, `CASES` all of them by name.
"""

from benchmarks.micro_batching.zoo import (
    coupled,
    layouts,
    logged,
    losses,
    sequences,
    state,
    text,
    training,
    vision,
)
from benchmarks.micro_batching.zoo.base import Case

THEMES: dict[str, tuple[Case, ...]] = {
    "text": text.CASES,
    "vision": vision.CASES,
    "audio and sequences": sequences.CASES,
    "losses": losses.CASES,
    "samples that depend on each other": coupled.CASES,
    "state that the step changes": state.CASES,
    "layouts of batches": layouts.CASES,
    "loaders and training": training.CASES,
    "logged values": logged.CASES,
}
CASES: dict[str, Case] = {case.name: case for cases in THEMES.values() for case in cases}
