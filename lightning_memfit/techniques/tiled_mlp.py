"""`TiledMLP`: feed-forward layers that run over a few tiles of a long sequence, one after the other.

What such a layer keeps for backward is several times as wide as its input, and grows with the sequence. Each token goes
through it by itself, so that a tile of the sequence can be run, and recomputed in backward, without the others. Tiles
of as many tokens as the layer is wide are those of Arctic Long Sequence Training (Bekman et al., 2025, arXiv
2506.13996). DeepSpeed's `TiledMLP` does the same, and needs code for each kind of layer.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_memfit.checkpointing.apply import CheckpointedForward
from lightning_memfit.checkpointing.blocks import select_blocks
from lightning_memfit.checkpointing.recompute import in_trace
from lightning_memfit.memory.modes import evaluating
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.techniques.core.callback import TechniqueCallback, describe
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.model_facts import MLP_PATH, find_mlps, mlp_width
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile

_MOST_DIFFERENCE = 1e-2
"""Largest relative difference between a token alone and one beside another that comes from rounding, in any dtype."""


class TiledMLP(TechniqueCallback):
    """Run feed-forward layers over tiles of the sequence, of which one keeps activations at a time.

    Gradients are exact up to the order of additions. Each tile is recomputed in backward, which costs a forward pass of
    these layers. It goes with `ActivationCheckpointing`, which keeps the inputs of blocks: then the peak inside a block
    is that of attention.

    Args:
        num_tiles: Tiles of a sequence; by default as many as make a tile as long as the layer is wide, so that a
            sequence shorter than that runs as it is.
        modules: Class names or dotted names of the layers; by default those of Hugging Face and others whose class is
            called `...MLP`, `...FFN`, `...FeedForward` or `...ActDense`. They take `(..., tokens, width)`, and return a
            tensor of as many tokens.

    Raises:
        ValueError: If `num_tiles` is less than 1.
    """

    def __init__(self, num_tiles: int | None = None, modules: str | Sequence[str] = ()) -> None:
        super().__init__()
        if num_tiles is not None and num_tiles < 1:
            raise ValueError(f"`num_tiles={num_tiles}` must be at least 1.")
        self.num_tiles = num_tiles
        self.modules = modules
        self._tiled: set[int] = set()

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the layers' `forward` once the module is complete."""
        self.on_restore(self._tiled.clear)
        self.when_complete(pl_module, lambda: self._tile(pl_module))

    def _tile(self, module: nn.Module) -> None:
        """Wrap them.

        Raises:
            ValueError: If there are none.
        """
        found = find_mlps(module)
        if self.modules:
            found = [one for group in select_blocks(module, self.modules) for one in group.modules]
        if not found:
            raise ValueError(f"TiledMLP: {_NO_MLP}")
        new = [layer for layer in found if id(layer) not in self._tiled]  # WeightAveraging configures the model twice
        for layer in new:
            self._tiled.add(id(layer))
            self.on_restore(wrap_method(layer, "forward", _Tiles(layer, self.num_tiles).run))
        self.announce(f"{describe(Counter(type(layer).__name__ for layer in new))} in tiles of the sequence")


class _Tile(CheckpointedForward):
    """Runs a layer over one tile, and once more in backward."""

    @override
    def inner(self, hidden: Tensor) -> Any:
        return super().inner(hidden.contiguous())  # layers may ask for a `view`; the copy is not kept


class _Tiles:
    """Runs a layer over tiles.

    Args:
        layer: The layer.
        num_tiles: As for `TiledMLP`.
    """

    def __init__(self, layer: nn.Module, num_tiles: int | None) -> None:
        self.layer = layer
        self._width = mlp_width(layer)
        self._num_tiles = num_tiles
        self._tile = _Tile(layer, "full")
        self._is_checked = False

    def run(self, inner: Callable[..., Any], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the layer.

        Raises:
            ValueError: If it takes or returns something else than a tensor with a row per token, or a token's row
                depends on others.
        """
        if args or kwargs or not isinstance(hidden, Tensor) or hidden.ndim < 2:
            raise ValueError(self._refusal("is called with more than a tensor of tokens"))
        length = hidden.shape[-2]
        tile = self._width if self._num_tiles is None else -(-length // self._num_tiles)
        if not 0 < tile < length:
            return inner(hidden)
        if not self._is_checked and not in_trace():
            self._check(hidden)
        return torch.cat([self._tile(part) for part in hidden.split(tile, dim=-2)], dim=-2)

    def _check(self, hidden: Tensor) -> None:
        """Check once that a token's row is the same beside another and alone.

        Raises:
            ValueError: If it isn't.
        """
        self._is_checked = True
        with evaluating(self.layer), torch.no_grad():
            two = self._tile.inner(hidden[..., :2, :])
            one = self._tile.inner(hidden[..., 1:2, :])
        if not isinstance(two, Tensor) or two.shape[:-1] != hidden[..., :2, :].shape[:-1]:
            raise ValueError(self._refusal("returns something else than a tensor with a row for each token"))
        difference = (two[..., 1:2, :] - one).float().norm() / one.float().norm().clamp(min=1e-30)
        if not difference <= _MOST_DIFFERENCE and bool(one.isfinite().all()):
            raise ValueError(self._refusal("gives a token another row when it is alone: it mixes tokens"))

    def _refusal(self, reason: str) -> str:
        name = type(self.layer).__name__
        return f"TiledMLP: {name} {reason}, and can't run in tiles. Name other layers in `modules`, or leave it out."


# --- technique --------------------------------------------------------------------------------------------------------

_NO_MLP = (
    "the module has no layer whose class is called `...MLP`, `...FFN`, `...FeedForward` or `...ActDense`. Name its "
    "feed-forward layers in `modules`, or leave TiledMLP out."
)


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if there are feed-forward layers, and sequences that are longer than these are wide."""
    facts = run.facts
    if options.get("modules"):
        return None
    if facts.mlp_width == 0:
        return _NO_MLP
    length, width = facts.sequence_length, facts.mlp_width
    if options.get("num_tiles") is None and length is not None and length <= (width or length):
        return (
            f"sequences of {length} tokens are not known to be longer than feed-forward layers are wide ({width}), and "
            "run in one tile. Leave it out, or set `num_tiles`."
        )
    return None


def cost(profile: "ModelProfile", options: Options) -> Cost:
    """A forward pass of the layers, by their weights, and twice the launches."""
    weights = [p for p in profile.parameters if p.dims == 2 and MLP_PATH.search(p.name)]
    tokens = profile.micro_batch_size * (profile.sequence_length or 1)
    tiles = options.get("num_tiles") or max(1, math.ceil((profile.sequence_length or 1) / _width(weights)))
    flops = 2.0 * tokens * sum(weight.numel for weight in weights)
    return Cost(micro_batch=Work(flops=flops, kernels=3.0 * len(weights) * (tiles - 1)))


def _width(weights: Sequence[Any]) -> int:
    return min((min(weight.shape) for weight in weights if weight.shape), default=1)


TECHNIQUE = Technique(
    name="tiled_mlp",
    kind="mlp",
    summary="feed-forward layers in tiles of a long sequence, each recomputed in backward",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.tiled_mlp.TiledMLP"),),
    unsupported=unsupported,
    cost=cost,
    changes_step=False,
)
