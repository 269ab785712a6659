"""What a user says of the machine a plan is for: how many devices, how much memory and disk."""

from __future__ import annotations

import re

from lightning_memfit.planner.workload import Devices

_COUNT = re.compile(r"\s*(\d+)\s*x\s*(\S.*)", re.IGNORECASE)


def counted(name: str) -> tuple[int | None, str]:
    """`8x A100 80GB` as 8 and `A100 80GB`; None where a name says no number.

    Raises:
        ValueError: If it says there are none.
    """
    match = _COUNT.fullmatch(name)
    if match is None:
        return None, name
    count = int(match[1])
    if count < 1:
        raise ValueError(f"`--device {name}`: there must be at least one device.")
    return count, match[2].strip()


def devices_for(named: int | None, per_node: int, nodes: int, on_cpu: bool) -> Devices:
    """Devices to plan for: those that are named, on one machine, else those of the recipe.

    Args:
        named: Number in the device's name.
        per_node: `trainer.devices` of the recipe.
        nodes: `trainer.num_nodes` of the recipe.
        on_cpu: Whether the run is on the CPU.

    Raises:
        ValueError: If several processes are to share a CPU.
    """
    devices = Devices(named, 1) if named is not None else Devices(per_node, nodes)
    if on_cpu and devices.total > 1:
        raise ValueError(
            f"{devices.total} processes on CPUs are not planned for: they share memory and cores. Set "
            "`--trainer.devices 1`, or name a GPU with `--device`."
        )
    return devices
