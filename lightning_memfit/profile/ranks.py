"""Run a step as one rank of many, in one process and without communication.

torch's `fake` process group answers every collective at once and leaves tensors as they are. With it, Lightning's real
strategies, FSDP2 and DTensors do on fake tensors what a rank of the real run does with its memory.

Written for torch 2.11-2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_memfit.profile.data_parallel import traced_data_parallel
from lightning_memfit.profile.upstream.distributed import fake_process_group

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, and the one whose step is traced.

    Raises:
        ValueError: If there is no such rank, or machines of that size don't make up the run.
    """

    make_strategy: "Callable[[], Strategy]"
    """Makes the strategy anew for every trace, as a strategy belongs to one Trainer."""
    world_size: int
    """Ranks of the run."""
    rank: int = 0
    """The one that is traced. The first one often has the most: remainders of a division are the last ones'."""
    ranks_per_machine: int | None = None
    """By default all are on one machine."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"`world_size={self.world_size}` must be at least 1.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"`rank={self.rank}` must be from 0 to {self.world_size - 1}, the last of the run.")
        if self.ranks_per_machine is not None and (
            self.ranks_per_machine < 1 or self.world_size % self.ranks_per_machine
        ):
            raise ValueError(
                f"`ranks_per_machine={self.ranks_per_machine}` must divide the {self.world_size} ranks of the run."
            )

    def trainer_options(self) -> dict[str, Any]:
        """Arguments of a Trainer that runs the strategy as this rank."""
        per_machine = self.ranks_per_machine or self.world_size
        return {
            "devices": per_machine,
            "num_nodes": self.world_size // per_machine,
            "strategy": self.make_strategy(),
            "plugins": [_environment(self, per_machine)],
        }

    def settings(self) -> tuple[object, ...]:
        """What decides about a trace, for keys of caches."""
        strategy = self.make_strategy()
        return type(strategy), strategy, self.world_size, self.rank, self.ranks_per_machine


def own_rank(module: Any) -> Ranks | None:
    """The one rank of a run under DDP on one device, whose buckets take memory as on several; else None.

    Args:
        module: A LightningModule, perhaps attached to a Trainer.
    """
    if not is_alone_under_ddp(module):
        return None
    from lightning.pytorch.strategies import DDPStrategy

    return Ranks(partial(DDPStrategy, **module._trainer.strategy._ddp_kwargs), 1)


def is_alone_under_ddp(module: Any) -> bool:
    """Whether the Trainer that a module belongs to runs DDP on one device."""
    strategy = getattr(getattr(module, "_trainer", None), "strategy", None)
    if strategy is None:
        return False
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    is_ddp = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)  # one by inheritance
    return is_ddp and strategy.num_processes * strategy.num_nodes == 1


def _environment(ranks: Ranks, per_machine: int) -> Any:
    """The cluster environment of a run that exists only in a trace."""
    from lightning.fabric.plugins.environments import ClusterEnvironment

    class TracedEnvironment(ClusterEnvironment):
        @property
        @override
        def creates_processes_externally(self) -> bool:
            return True  # so that Lightning starts none

        @property
        @override
        def main_address(self) -> str:
            return "localhost"

        @property
        @override
        def main_port(self) -> int:
            return 0

        @staticmethod
        @override
        def detect() -> bool:
            return False

        @override
        def world_size(self) -> int:
            return ranks.world_size

        @override
        def set_world_size(self, size: int) -> None:
            pass

        @override
        def global_rank(self) -> int:
            return ranks.rank

        @override
        def set_global_rank(self, rank: int) -> None:
            pass

        @override
        def local_rank(self) -> int:
            return ranks.rank % per_machine

        @override
        def node_rank(self) -> int:
            return ranks.rank // per_machine

    return TracedEnvironment()


@contextmanager
def process_group_of(ranks: Ranks | None) -> Iterator[None]:
    """Be a rank of a run: its process group exists here, and is gone afterwards. None is for a run of one process."""
    if ranks is None:
        yield
        return
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    before: int = rank_zero_only.rank  # type: ignore[attr-defined]
    try:
        with fake_process_group(ranks.world_size, ranks.rank), traced_data_parallel():
            yield
    finally:
        # Strategies have told Lightning their rank, and what only the first may print would stay unsaid.
        rank_zero_only.rank = before  # type: ignore[attr-defined]
