"""Make Hugging Face models build correctly while ZeRO-3 partitions parameters as they are made.

Written for transformers 5.17 to 5.23, whose private names are used here only; `test_upstream_names.py` pins them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_memfit.extras import require
from lightning_memfit.profile.replaced import replaced

_DEPTH = 2
"""How far below a module its `_init_weights` reaches: to `self_attn.q_proj.weight` of a layer. GPT-2's attention scales
the weights of `c_proj`; transformers 5.17 gathers a module's own parameters only, and loses that."""


@contextmanager
def partitioned_builds(config: dict[str, Any]) -> Iterator[None]:
    """Make Hugging Face models get the weights they would get without partitioning.

    Inside `deepspeed.zero.Init` a parameter is partitioned, and looks empty, as soon as its module is made.
    `GPT2LMHeadModel(config)` then initializes empty tensors and keeps torch's own numbers (embeddings with a standard
    deviation of 1.0 instead of 0.02, a first loss of 89), and `from_pretrained` finds shapes that don't match. Inside
    this context the former gathers what it initializes, in the order of a plain build and thus with the same random
    numbers, and the latter knows of the partitioning.

    Raises:
        ModuleNotFoundError: If accelerate, which transformers needs for this, is not installed.
    """
    require("accelerate", "Building Hugging Face models under ZeRO-3")
    from transformers import PreTrainedModel
    from transformers.integrations.deepspeed import HfDeepSpeedConfig
    from transformers.modeling_utils import set_zero3_state

    plain, load = PreTrainedModel.initialize_weights, PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def initialize_weights(model: PreTrainedModel) -> None:
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            _initialize_partitioned(model)
        else:
            plain(model)  # type: ignore[no-untyped-call]

    def from_pretrained(kind: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        _loading.append(kind)
        try:
            return load(kind, *args, **kwargs)
        finally:
            _loading.pop()

    alive = HfDeepSpeedConfig(config)  # transformers holds it weakly: it counts while this frame lives
    try:
        with (
            replaced(PreTrainedModel, "initialize_weights", initialize_weights),
            replaced(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)),
            set_zero3_state(),  # the partitioning is on already: transformers must not start its own
        ):
            yield
    finally:
        del alive


_loading: list[type] = []
"""Classes whose `from_pretrained` is running, inside `partitioned_builds`."""


def is_loading_pretrained() -> bool:
    """Whether transformers is loading weights, which it gathers by itself, inside `partitioned_builds`."""
    return bool(_loading)


def _initialize_partitioned(model: Any) -> None:
    """`PreTrainedModel.initialize_weights`, in its order, with what each module may initialize gathered."""
    import deepspeed
    from transformers import PreTrainedModel
    from transformers.initialization import guard_torch_init_functions

    is_own_code = getattr(model, "is_custom_code", model.is_remote_code)()

    def apply(module: nn.Module, owner: Any) -> None:
        for child in module.children():
            apply(child, child if isinstance(child, PreTrainedModel) else owner)
        reached = _parameters(module, _DEPTH, PreTrainedModel)
        with deepspeed.zero.GatheredParameters(reached, modifier_rank=0, enabled=bool(reached)):
            if not reached or deepspeed.comm.get_rank() == 0:
                owner._initialize_weights(module, is_own_code)

    with torch.no_grad(), guard_torch_init_functions():
        apply(model, model)


def _parameters(module: nn.Module, depth: int, other: type) -> list[nn.Parameter]:
    """Parameters of a module and of those below it, as far as a depth and without models of their own."""
    found = dict.fromkeys(module.parameters(recurse=False))
    for child in module.children() if depth else ():
        if not isinstance(child, other):
            found.update(dict.fromkeys(_parameters(child, depth - 1, other)))
    return list(found)
