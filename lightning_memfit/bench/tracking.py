"""`Tracker`: one Weights & Biases run for one measured run, online or in a folder for `wandb sync`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_memfit.extras import require

Mode = Literal["online", "offline", "off"]

_SAMPLING_S = 1.0  # interval of system metrics; measured runs are short


@dataclass(frozen=True)
class Tracking:
    """Where the runs of a sweep are tracked."""

    mode: Mode
    project: str
    group: str
    folder: str

    def __post_init__(self) -> None:
        if self.mode != "off":
            require("wandb", f"`--wandb {self.mode}` (or take `--wandb off`)")


class Tracker:
    """A W&B run, open from before the training until its figures are known.

    While steps are timed, only W&B's own system metrics are sent; the steps are logged at the end.
    """

    def __init__(self, tracking: Tracking, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        Path(tracking.folder).mkdir(parents=True, exist_ok=True)
        assert tracking.mode != "off"
        self._run = wandb.init(
            project=tracking.project,
            group=tracking.group,
            name=name,
            dir=tracking.folder,
            config=dict(config),
            mode=tracking.mode,
            settings=wandb.Settings(console="off", silent=True, x_stats_sampling_interval=_SAMPLING_S),
        )

    def finish(self, steps: list[dict[str, float]], outcome: Mapping[str, Any]) -> None:
        """Log the steps, add the prediction to the configuration and all figures to the summary, and close the run."""
        for step in steps:
            self._run.log(step)
        self._run.config.update({"predicted": outcome.get("predicted")})
        self._run.summary.update(_flat(outcome))
        self._run.finish(exit_code=1 if outcome["status"] == "failed" else 0)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"speed": {"a": 1}}` as `{"speed/a": 1}`, without entries that are None."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}/"))
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat
