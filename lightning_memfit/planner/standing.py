"""`Standing`: what an optimizer's steps keep alive and need, read off a trace of steps alone."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_memfit.memory import Category
from lightning_memfit.planner.released import Transients, transients_of
from lightning_memfit.profile.events import EventList
from lightning_memfit.profile.record import ModelProfile


@dataclass(frozen=True)
class Standing:
    """Bytes on the device around the second optimizer step."""

    kept_bytes: int
    """Alive when the second step begins: weights, gradients, states."""
    backward_bytes: int
    """Highest level of the second backward pass."""
    step_bytes: int
    """Highest level of the optimizer's second step."""
    state_bytes: int
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    communication_bytes: int = 0
    """Buckets and gathered weights of a strategy."""
    transients: Transients = ()
    """Of gradients that are stepped and freed during backward; empty where they are kept."""

    @classmethod
    def of(cls, profile: ModelProfile, rounding: int) -> Standing:
        """Read it off a trace of two steps; `rounding` is the allocator's, in bytes."""
        events = profile.events
        live = events.live_bytes(rounding)
        spans = second_step(events)
        start = spans["forward"][0]
        alive = events.breakdown_at(start - 1, rounding)
        backwards = later_phases(events, "backward")
        return cls(
            kept_bytes=int(live[start - 1]),
            backward_bytes=max(int(live[a:b].max()) for a, b in backwards),
            step_bytes=max(int(live[a:b].max()) for a, b in later_phases(events, "step")),
            state_bytes=events.breakdown_at(spans["step"][1] - 1, rounding).get(Category.OPTIMIZER_STATE),
            parameter_bytes=alive.get(Category.PARAMETER),
            buffer_bytes=alive.get(Category.BUFFER),
            gradient_bytes=alive.get(Category.GRADIENT),
            transients=transients_of(live[backwards[-1][0] - 1 : backwards[-1][1]]),
        )

    def extended(self, larger: Standing, blocks: int, larger_blocks: int, num_blocks: int) -> Standing:
        """The same with more repeated blocks, each of which adds what it adds between two numbers of them.

        Args:
            larger: With more blocks than this.
            blocks: Of this.
            larger_blocks: Of `larger`.
            num_blocks: Wanted.
        """
        values = {}
        for name in (field.name for field in fields(self) if field.name != "transients"):
            own, other = getattr(self, name), getattr(larger, name)
            values[name] = own + (num_blocks - blocks) * (other - own) // (larger_blocks - blocks)
        return Standing(**values, transients=larger.transients)


def later_phases(events: EventList, wanted: str) -> list[tuple[int, int]]:
    """First event and the one after the last of every phase of a name, the first optimizer step's left out."""
    names = [name for _, name in events.phases]
    starts = [*(at for at, _ in events.phases), len(events)]
    second = names.index("step") + 1
    return [
        (starts[i], starts[i + 1])
        for i, name in enumerate(names)
        if i >= second and name == wanted and starts[i + 1] > starts[i]
    ]


def second_step(events: EventList) -> dict[str, tuple[int, int]]:
    """The first phase of every name after the first optimizer step."""
    found = {name: later_phases(events, name) for name in ("forward", "backward", "step")}
    return {name: spans[0] for name, spans in found.items() if spans}
