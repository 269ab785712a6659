"""Buffer sizes of a DeepSpeed configuration, from the model that is trained."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

_SMALLEST = 2**20
_LARGEST_BUCKET = 200_000_000  # Lightning's default
_LARGEST_SUB_GROUP = 100_000_000
_PARTS = 16


@dataclass(frozen=True)
class ModelSizes:
    """Elements of a model's parameters, counted over all ranks.

    Attributes:
        total: All parameters.
        largest: The largest single parameter.
    """

    total: int
    largest: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> "ModelSizes":
        """Count parameters, those that ZeRO-3 has partitioned already at their full size.

        Raises:
            ValueError: If there are none.
        """
        counts = [int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters]
        if not counts:
            raise ValueError("The module has no parameters to train.")
        return cls(sum(counts), max(counts))


def sized(zero: dict[str, Any], model: ModelSizes, world_size: int) -> dict[str, Any]:
    """Return the `zero_optimization` section with sizes, in elements, where it names none.

    - Buckets hold the largest parameter, so that none needs a bucket of its own, up to Lightning's 2e8.
    - A stage-3 rank updates its parameters in sixteen sub-groups: each makes fp32 copies of its gradients, which
      Lightning's 1e12 (one group) turns into a second model.
    - Stage 3 keeps a quarter of the model gathered at most, where DeepSpeed's 1e9 keeps all of most models.

    Args:
        zero: The section.
        model: Sizes of the model.
        world_size: Number of ranks the parameters are divided among.
    """
    bucket = _within(_SMALLEST, model.largest, _LARGEST_BUCKET)
    sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero["stage"] == 3:
        live = max(2 * model.largest, model.total // 4, _SMALLEST)
        sizes |= {
            "sub_group_size": _within(_SMALLEST, -(-model.total // (world_size * _PARTS)), _LARGEST_SUB_GROUP),
            "stage3_prefetch_bucket_size": min(bucket, live // 2),
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
        }
    return sizes | zero


def _within(low: int, value: int, high: int) -> int:
    return max(low, min(value, high))
