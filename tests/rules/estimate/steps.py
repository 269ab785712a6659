"""A made-up profile whose memory is known by heart."""

import numpy as np

from lightning_memfit.memory import MIB, Category
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.profile.events import CATEGORIES, EventList
from lightning_memfit.profile.record import ModelProfile

WEIGHT, GRADIENT, STATE, SCRATCH = 40 * MIB, 40 * MIB, 80 * MIB, 40 * MIB
SAMPLE = 3 * MIB
"""Activation bytes per sample."""


def step_profile(micro_batch_size=4, device="cuda", any_size=True):
    """Two steps: the weights stay, an activation comes and goes, gradient and states appear, the step needs scratch."""
    storages = [
        (WEIGHT, Category.PARAMETER, "layer.weight"),
        (SAMPLE * micro_batch_size, Category.ACTIVATION, "layer | aten.mm.default"),
        (GRADIENT, Category.GRADIENT, "layer.weight"),
        (STATE, Category.OPTIMIZER_STATE, "layer.weight"),
        (SCRATCH, Category.TEMPORARY, "aten._foreach_sqrt.default"),
        (SAMPLE * micro_batch_size, Category.ACTIVATION, "layer | aten.mm.default"),
        (GRADIENT, Category.GRADIENT, "layer.weight"),
        (SCRATCH, Category.TEMPORARY, "aten._foreach_sqrt.default"),
    ]
    events = [1, 2, 3, -2, 4, 5, -5, 6, -3, 7, -6, 8, -8, -7, -4, -1]
    phases = [
        (0, "setup"), (1, "forward"), (2, "backward"), (4, "step"), (7, "forward"), (8, "backward"), (11, "step"),
        (13, "end"),
    ]  # fmt: skip
    sites = list(dict.fromkeys(site for _, _, site in storages))
    return ModelProfile(
        name="Layer",
        events=EventList(
            events=np.array(events),
            event_blocks=np.full(len(events), -1),
            sizes=np.array([size for size, _, _ in storages]),
            categories=np.array([CATEGORIES.index(category) for _, category, _ in storages]),
            sites=np.array([sites.index(site) for _, _, site in storages]),
            site_names=tuple(sites),
            phases=tuple(phases[1:]),
        ),
        micro_batch_size=micro_batch_size,
        parameters=(ParameterInfo("layer.weight", WEIGHT // 4, 4, dims=2, shape=(1024, WEIGHT // 4096)),),
        slopes=np.array([0.0, SAMPLE, 0, 0, 0, SAMPLE, 0, 0]) if any_size else None,
        device=device,
        optimizer="AdamW",
    )
