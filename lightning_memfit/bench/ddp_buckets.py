"""How many bytes the buckets of `DistributedDataParallel` hold: its reducer allocates them outside of any dispatch.

Reads `DistributedDataParallel._get_ddp_logging_data` (torch 2.9 to 2.13), the only place that tells;
`tests/unit/bench/test_ddp_buckets.py` fails when it moves.
"""

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def bucket_bytes(model: Any) -> int:
    """Bytes of all gradient buckets of a wrapped module; 0 for any other."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return sum(int(size) for size in str(sizes).split(",") if size.strip())
