"""The strategies' names: `Trainer(strategy="memfit_zero_2")` is the record `zero_2` of `techniques.strategies`."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_memfit.techniques.core.technique import CallbackSpec
from lightning_memfit.techniques.strategies import KNOWN

_ONLY_IN_PLANS = ("pin_memory",)
"""Arguments that records set because a plan made sure of the room; chosen by name, a strategy uses its own default."""


def register() -> None:
    """Make the strategies known to `Trainer(strategy=...)` by name. Safe to call twice."""
    for record in KNOWN.values():
        spec = record.trainer["strategy"]
        arguments = {key: value for key, value in spec.get("init_args", {}).items() if key not in _ONLY_IN_PLANS}
        made = CallbackSpec(spec["class_path"]).load()
        StrategyRegistry.register(f"memfit_{record.name}", made, record.summary, override=True, **arguments)
