"""How many bytes the buckets of `DistributedDataParallel` hold: its reducer allocates them outside of any dispatch.

Reads `DistributedDataParallel._get_ddp_logging_data` (torch 2.9 to 2.13), the only place that tells, and
`DDPStrategy._ddp_kwargs` (Lightning 2.6); `tests/unit/bench/test_ddp_buckets.py` fails when they move.
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_memfit.memory import Category


def bucket_bytes(model: Any) -> int:
    """Bytes of the gradient buckets of a wrapped module beside its gradients; 0 where gradients lie in the buckets."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return sum(int(size) for size in str(sizes).split(",") if size.strip())


def with_buckets(by_category: Mapping[Category, int], size_bytes: int, followed_steps: int) -> dict[Category, int]:
    """Bytes by category with DDP's buckets as communication.

    DDP allocates its buckets when it wraps the module, which no ledger sees, and anew in the forward of the second
    step, which a ledger takes for activations.

    Args:
        by_category: What a ledger counted.
        size_bytes: From `bucket_bytes`.
        followed_steps: Optimizer steps that the ledger followed, from the first on.
    """
    result = dict(by_category)
    if not size_bytes:
        return result
    result[Category.COMMUNICATION] = size_bytes
    if followed_steps > 1:
        result[Category.ACTIVATION] = result.get(Category.ACTIVATION, 0) - size_bytes
    return result


def holds_whole_model(strategy: Strategy) -> bool:
    """Whether every process trains all of the model by itself: what predictions are for."""
    whole = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
    return whole and not isinstance(strategy, DeepSpeedStrategy)


def copies_gradients(strategy: Strategy) -> bool:
    """Whether a strategy keeps all gradients a second time, in the buckets of DDP."""
    if not isinstance(strategy, DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
        return False
    return not strategy._ddp_kwargs.get("gradient_as_bucket_view", False)
