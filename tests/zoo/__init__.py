"""Small modules and steps with what is wanted of each: the net under every change of the package.

`THEMES` has the cases of micro-batching that the docs' page of exactness shows, `CASES` all of them by name;
`tests.zoo.trials` has every case with the public name that is tried on it, and `python -m tests.zoo` tries them.
"""

from tests.zoo import (
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
from tests.zoo.base import Case

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
