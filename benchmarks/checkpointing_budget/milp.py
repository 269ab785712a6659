"""The checkpointing problem as a mixed-integer program, to hold the solver against."""

import numpy as np

from lightning_memfit.checkpointing.knapsack import CheckpointingProblem


def milp_bound_seconds(problem: CheckpointingProblem, budget_bytes: int) -> float:
    """Extra time that no plan within the budget can be below (HiGHS' dual bound)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    num_blocks, width = len(problem.blocks), len(problem.blocks[0])
    kept = np.array([[o.kept_bytes for o in options] for options in problem.blocks]) / 1e6
    peaks = np.array([[o.peak_bytes for o in options] for options in problem.blocks]) / 1e6
    seconds = np.array([[o.seconds for o in options] for options in problem.blocks]) * 1e3
    one_each = np.kron(np.eye(num_blocks), np.ones(width))
    rows = np.zeros((num_blocks + 1, num_blocks, width))
    for block in range(num_blocks + 1):
        rows[block, :block] = kept[:block]
        if block < num_blocks:
            rows[block, block] = peaks[block]
    limits = np.full(num_blocks + 1, budget_bytes / 1e6)
    limits[-1] -= problem.head_bytes / 1e6
    result = milp(
        seconds.ravel(),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(rows.reshape(num_blocks + 1, -1), -np.inf, limits + 1e-9),
        ],
        integrality=np.ones(num_blocks * width),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-4, "time_limit": 20},
    )
    return float(result.mip_dual_bound) / 1e3
