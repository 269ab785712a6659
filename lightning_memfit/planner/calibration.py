"""Correcting rates by measured steps, kept per device in the cache folder.

Every observation is a step's predicted seconds by component and its measured seconds. The factors minimise the squared
relative errors of their weighted sums, with a pull towards one common factor, so that a single observation scales
everything alike and many tell the components apart (ridge regression, Hoerl & Kennard 1970; factors stay positive).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lightning_memfit.planner.cost import COMPONENTS, Rates
from lightning_memfit.profile.cache import default_cache_folder

_MAX_OBSERVATIONS = 64
_PULL = 0.05
"""Weight of the common factor against one observation's relative error."""
_LOW, _HIGH = 0.1, 10.0


@dataclass(frozen=True)
class Observation:
    """One measured step."""

    seconds: Mapping[str, float]
    """Predicted by component, with the rates as they are without correction."""
    measured: float


class CalibrationFile:
    """Observations of one device.

    Args:
        name: Of the device, with the number of threads for a CPU.
        folder: Where files lie; the cache folder by default.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        self.path = (folder or default_cache_folder()) / "rates" / f"{slug}.json"

    def load(self) -> list[Observation]:
        """What was measured; nothing where there is no file that can be read."""
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))
            return [Observation(row["seconds"], row["measured"]) for row in rows]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def add(self, seconds: Mapping[str, float], measured: float) -> None:
        """Keep an observation; of many the newest.

        Args:
            seconds: Predicted by component, without corrections (`uncorrected`).
            measured: Seconds of the step.

        Raises:
            ValueError: If the measured time is not positive.
        """
        if measured <= 0:
            raise ValueError(f"`measured={measured}` seconds must be positive.")
        kept = [*self.load(), Observation(seconds, measured)][-_MAX_OBSERVATIONS:]
        rows = [{"seconds": dict(o.seconds), "measured": o.measured} for o in kept]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def uncorrected(seconds: Mapping[str, float], rates: Rates) -> dict[str, float]:
    """Predicted seconds by component as they were without what was measured before."""
    return {name: value / rates.factor(name) for name, value in seconds.items()}


def calibrated(rates: Rates, folder: Path | None = None) -> Rates:
    """Rates corrected by what was measured on that device, if anything was."""
    observations = CalibrationFile(rates.name, folder).load()
    return replace(rates, factors=fit_factors(observations)) if observations else rates


def fit_factors(observations: Sequence[Observation], rounds: int = 200) -> dict[str, float]:
    """Factor of every component, by coordinate descent; each within 0.1 and 10.

    Raises:
        ValueError: If there are no observations.
    """
    if not observations:
        raise ValueError("`observations` is empty: there is nothing to fit.")
    measured = np.array([o.measured for o in observations])
    shares = np.array([[o.seconds.get(name, 0.0) for name in COMPONENTS] for o in observations]) / measured[:, None]
    totals = shares.sum(axis=1)
    common = float(np.clip((totals @ np.ones(len(totals))) / max(float(totals @ totals), 1e-30), _LOW, _HIGH))
    factors = np.full(len(COMPONENTS), common)
    for _ in range(rounds):
        for index in range(len(COMPONENTS)):
            column = shares[:, index]
            rest = 1.0 - shares @ factors + column * factors[index]
            # The pull counts relative to the common factor, whatever its size.
            pull = _PULL / common**2
            factors[index] = (column @ rest + pull * common) / (column @ column + pull)
            factors[index] = np.clip(factors[index], _LOW, _HIGH)
    return {name: float(value) for name, value in zip(COMPONENTS, factors, strict=True)}
