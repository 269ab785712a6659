"""`Optimist`: what a combination of techniques takes and needs at least, by what other combinations' traces showed.

Most combinations that a bound on products leaves (`Bounds.seconds`) are a few percent slower than the best plan, as
they leave less of the device to activations, so that more is recomputed. That shows without further traces:

- What stands on the device is at least what closed forms count (`Bounds.least_bytes`), so that no trace of the
  optimizer's steps is needed.
- Blocks keep and recompute the same under every loss. Where the plain passes of one loss need no less than those of
  another whose recomputation was traced, that one's blocks are a bound, without what the allocator makes of them.
"""

from __future__ import annotations

import numpy as np

from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.estimate.block_figures import BlockFigures
from lightning_memfit.planner.candidates import Rejected, with_losses
from lightning_memfit.planner.memory import MemoryModel, Passes
from lightning_memfit.planner.placement import Placement
from lightning_memfit.planner.solve import Solution, Solver
from lightning_memfit.planner.steady_state import Standing, Transients
from lightning_memfit.planner.time import PassWork
from lightning_memfit.techniques.core.setting import Setting


class _Unknown(Exception):
    """Nothing was traced that bounds a combination."""


class Optimist(Solver):
    """Solve combinations as if they needed no more than what is known of them.

    Args:
        solver: Whose traces are used.
    """

    def __init__(self, solver: Solver) -> None:
        super().__init__(solver.laboratory)
        self.bounds = solver.bounds
        self._passes = solver._passes

    def least(self, setting: Setting) -> Solution | Rejected | None:
        """A plan that no plan of these techniques is better than, from what is traced already.

        Returns:
            None where too little is known; `Rejected` where not even this fits.
        """
        try:
            return self.solve(setting)
        except _Unknown:
            return None

    def model(self, setting: Setting) -> MemoryModel:
        """Memory of a setting's techniques at least."""
        techniques = setting.without_sizes().without("checkpointing")
        if techniques not in self._models:
            dtype = self.bounds.dtype(techniques, self.bounds.cost(techniques))
            passes, placement = self._known_passes(techniques), self._least_placement(techniques)
            self._models[techniques] = MemoryModel(self.laboratory, techniques, passes, dtype, placement)
        return self._models[techniques]

    def _least_placement(self, setting: Setting) -> Placement:
        if setting.sharding is not None and setting.sharding.deepspeed:
            return self.bounds.placement(setting)
        least = self.bounds.least_bytes(setting) - self.bounds.overhead_bytes
        return Placement(Standing(least, least, least, state_bytes=0))

    def _known_passes(self, setting: Setting) -> Passes:
        """A setting's passes, or those with the blocks of another loss.

        Raises:
            _Unknown: If neither is traced.
        """
        own = self._passes_of(setting)
        if own.is_traced:
            return own
        for _, other in with_losses(setting):
            if self.laboratory.has_passes(other, "none") and (lender := self._passes_of(other)).is_traced:
                return _BorrowedBlocks(own, lender)
        raise _Unknown


class _BorrowedBlocks(Passes):
    """Passes of which only the plain ones are traced, with another's recomputation.

    Args:
        own: Of the setting.
        lender: With the same blocks; every choice is traced.
    """

    def __init__(self, own: Passes, lender: Passes) -> None:
        super().__init__(own._laboratory, own._setting, own.rounding)
        self._own = own
        self._lender = lender

    @property
    def knows_every_size(self) -> bool:
        return self.none.knows_every_size and self._lender.knows_every_size

    def figures(self, choice: Choice, size: int, released: Transients = ()) -> BlockFigures:
        own = self._own.figures("none", size, released)
        if choice == "none":
            return own
        plain, found = (self._lender.figures(each, size, released) for each in ("none", choice))
        if not (_all(plain.kept <= own.kept) and _all(plain.peak <= own.peak) and plain.head <= own.head):
            raise _Unknown
        return found

    def recomputed(self, choice: Choice, size: int) -> PassWork:
        return self._lender.recomputed(choice, size)

    def fragmentation_bytes(self, choice: Choice, size: int, other_steps: bool) -> int:
        return 0


def _all(holds: np.ndarray) -> bool:
    return bool(holds.all())
