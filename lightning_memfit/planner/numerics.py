"""`NumericsOf`: how far a setting's numbers are from the recipe's, and how much faster it must be to be taken for that.

A setting keeps the recipe's numbers if its precision and its adapters are the recipe's own and everything else in it is
`exact` or of a class that the recipe's own techniques have. Any other is lossy: the search takes `1 + tolerance` times
its time, in bounds as well as in solutions, so that one branch and bound proves that no setting that keeps the numbers
is within the tolerance of the fastest lossy one. With `KEEP_NUMBERS` a lossy one wins only if nothing else fits.
"""

from __future__ import annotations

from lightning_memfit.planner.workload import Workload
from lightning_memfit.techniques.core.setting import Setting, TechniqueChoice
from lightning_memfit.techniques.core.technique import TOLERANCES, WORDS, Numerics

UNSURE = 0.05
"""Error to expect between the times of several devices, which rest on data sheets and not on measurements."""


class NumericsOf:
    """Compare the numbers of settings with those of one workload's recipe.

    Args:
        workload: Its precision is the recipe's own.

    Attributes:
        tolerance: Share of its time that a setting may take longer to keep the recipe's numbers. With several devices
            no less than the error of their times.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._own, self._adapter = workload.options.precision, workload.adapter
        self._classes = frozenset() if workload.own is None else workload.own.numerics
        self._divided = workload.division is not None
        self.tolerance = max(workload.tolerance, UNSURE if workload.devices.total > 1 else 0.0)
        self._known: dict[Setting, float] = {}

    def severity(self, setting: Setting) -> float:
        """How much a setting changes: 0 if it keeps the recipe's numbers, else its classes' `TOLERANCES` together."""
        techniques = setting.without_sizes().without("checkpointing")
        if techniques not in self._known:
            lossy = [self._lossy(choice, setting) for choice in techniques.chosen]
            other = TOLERANCES["exact"] if self._other_precision(setting) else 0.0
            self._known[techniques] = other + sum(TOLERANCES[name] for name in frozenset().union(*lossy))
        return self._known[techniques]

    def weight(self, setting: Setting) -> float:
        """What a setting's time is multiplied by in comparisons."""
        return 1.0 + self.tolerance if self.severity(setting) else 1.0

    def changes(self, setting: Setting) -> tuple[str, ...]:
        """What a setting changes in the recipe's numbers, in words; empty if it keeps them."""
        found = [self._other_precision(setting)]
        for choice in setting.chosen:
            classes = self._lossy(choice, setting)
            if choice.technique.kind != "precision" and classes:
                what = "optimizer states" if choice.technique.kind == "optimizer" else "frozen weights"
                words = ", ".join(WORDS[name].format(what) for name in WORDS if name in classes)
                found.append(f"{words} ({choice.name})")
        several = setting.micro_batch_size and setting.world_size * setting.accumulate_grad_batches > 1
        if several and self._workload.batching is not None and not self._workload.is_cut(setting):
            found.append("means over the tokens of each micro-batch, as DeepSpeed accumulates without MicroBatching")
        return tuple(words for words in found if words)

    def _lossy(self, choice: TechniqueChoice, setting: Setting) -> frozenset[Numerics]:
        """Classes of numerics, other than exact ones and the recipe's own, that a technique needs."""
        if choice == self._adapter or (choice.technique.kind == "precision" and not self._other_precision(setting)):
            return frozenset()
        own = frozenset() if choice.technique.kind == "precision" else self._classes
        return choice.technique.numerics - own - {"exact"}

    def _other_precision(self, setting: Setting) -> str:
        """How a setting's precision is not the recipe's own, in words; empty if it is.

        DeepSpeed keeps weights in half precision where Lightning's mixed precision keeps them in fp32.
        """
        choice, sharding = setting.of_kind("precision"), setting.sharding
        if sharding is not None and sharding.deepspeed and not self._divided and setting.precision.endswith("-mixed"):
            return f"DeepSpeed's {setting.precision}, with half-precision weights, instead of {self._own}"
        if choice is not None and choice.technique.changes_step:
            return f"{choice.name} instead of {self._own}"
        return f"{setting.precision} instead of {self._own}" if setting.precision != self._own else ""
