"""Learning-rate schedules, counted in optimizer steps."""

import math


def cosine_with_warmup(step: int, *, warmup_steps: int, total_steps: int, floor: float) -> float:
    """Factor of the peak learning rate at an optimizer step.

    Rises linearly to 1 over `warmup_steps` (step 0 already learns), then falls along half a cosine to `floor`, which is
    reached at `total_steps` and kept. Loshchilov and Hutter, "SGDR", 2017, without restarts.

    Args:
        step: Optimizer steps done.
        warmup_steps: Optimizer steps of the linear rise.
        total_steps: Optimizer steps of the whole run.
        floor: Factor at the end, in [0, 1].
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
