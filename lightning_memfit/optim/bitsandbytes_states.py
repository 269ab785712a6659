"""What the states of a bitsandbytes optimizer must look like, and seeing to it that they do.

Written for bitsandbytes 0.49 and 0.50. It relies on `Optimizer8bit.get_config`, `get_state_buffer`, `name2qmap`, `args`
and on the state keys `state1`, `state2`, `absmax1`, `absmax2`; `tests/unit/optim/test_bitsandbytes_states.py` fails
when these move.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

_MOMENTS = ("state1", "state2")
_BLOCK_SIZE = 256  # elements that share one scale, fixed in bitsandbytes' kernels


class StateWidths:
    """Decides per parameter whether its states have 8 or 32 bits, and keeps to it.

    bitsandbytes asks a process-wide `GlobalOptimManager`, whose `register_parameters` stores overrides by (group,
    index), so that they leak into every other optimizer. This table belongs to one optimizer and is keyed by the
    parameter itself. An override that a user registered for the parameter (`override_config`) still counts.

    Args:
        optimizer: A bitsandbytes optimizer that has not stepped yet.
        keep_32bit: Parameters whose states stay 32-bit; held weakly, they need not be in the optimizer.
    """

    def __init__(self, optimizer: Any, keep_32bit: Iterable[torch.Tensor] = ()) -> None:
        self.bits: int = optimizer.args.optim_bits
        self.min_8bit_size: int = optimizer.args.min_8bit_size
        self._overrides: dict[int, dict[str, Any]] = optimizer.mng.pid2config
        self._kept = WeakIdKeyDictionary()
        for parameter in keep_32bit:
            self._kept[parameter] = True
        upstream_config = type(optimizer).get_config
        # A cycle would keep the states alive until the garbage collector runs.
        reference = weakref.ref(optimizer)

        def get_config(gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config = upstream_config(reference(), gindex, pindex, group)
            config["optim_bits"] = self._requested(group["params"][pindex])
            return config

        optimizer.get_config = get_config
        optimizer.state_widths = self

    def bits_of(self, parameter: torch.Tensor) -> int:
        """Promised bits per state element of one parameter."""
        return 32 if parameter.numel() < self.min_8bit_size else self._requested(parameter)

    def _requested(self, parameter: torch.Tensor) -> int:
        default = 32 if parameter in self._kept else self.bits
        return self._overrides.get(id(parameter), {}).get("optim_bits", default)


def check_states(optimizer: Any) -> None:
    """Make sure that existing states have the promised width, shape and number of scales. Reads no values.

    Args:
        optimizer: Made by `to_bitsandbytes`, after a step.

    Raises:
        RuntimeError: If a state differs; the message names the parameter's shape, what was found and what was promised.
    """
    for parameter, state in optimizer.state.items():
        bits = optimizer.state_widths.bits_of(parameter)
        expected = torch.uint8 if bits == 8 else torch.float32
        for key in _MOMENTS:
            if key not in state:
                continue
            moment = state[key]
            if moment.dtype is not expected or moment.numel() % parameter.numel():
                raise RuntimeError(_complaint(optimizer, parameter, key, moment, bits))
            scales = state.get(key.replace("state", "absmax"))
            num_scales = -(-parameter.numel() // _BLOCK_SIZE) * (moment.numel() // parameter.numel())
            if bits == 8 and (scales is None or scales.numel() != num_scales):
                raise RuntimeError(_complaint(optimizer, parameter, key, scales, bits))


def _complaint(optimizer: Any, parameter: torch.Tensor, key: str, found: torch.Tensor | None, bits: int) -> str:
    what = "nothing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
    return (
        f"{type(optimizer).__name__} was to keep {bits}-bit states for a parameter of shape {tuple(parameter.shape)}, "
        f"but its {key!r} holds {what}. Another library changed bitsandbytes' settings, or a checkpoint with other "
        "states was loaded; use the settings the checkpoint was written with, or start from its weights only."
    )


def repage_states(optimizer: Any) -> int:
    """Put the states of a paged optimizer back into paged memory after `load_state_dict`, which makes ordinary tensors.

    Returns:
        Number of state tensors moved (0 on the CPU, where nothing is paged).
    """
    moved = 0
    for parameter, key, moment in list(_unpaged(optimizer)):
        buffer = optimizer.get_state_buffer(parameter, dtype=moment.dtype)
        if not getattr(buffer, "is_paged", False):
            continue  # bitsandbytes pages nothing under 1e5 elements
        buffer.copy_(moment)
        optimizer.state[parameter][key] = buffer
        moved += 1
    return moved


def _unpaged(optimizer: Any) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    if not optimizer.is_paged:
        return
    for parameter, state in optimizer.state.items():
        for key in _MOMENTS:
            moment = state.get(key)
            # AdEMAMix stacks two moments in one tensor, for which it makes a buffer of its own.
            if moment is None or parameter.device.type == "cpu" or moment.shape != parameter.shape:
                continue
            if not getattr(moment, "is_paged", False):
                yield parameter, key, moment


def make_maps_fake(optimizer: Any) -> None:
    """Give an optimizer over fake parameters fake quantization maps, so that it steps under `FakeTensorMode`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fake = parameter.data
            if isinstance(fake, FakeTensor):
                maps = {name: fake.fake_mode.from_tensor(table) for name, table in optimizer.name2qmap.items()}
                optimizer.name2qmap = maps
                return


def embedding_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Weights of all embeddings in a module, each once. A head tied to an embedding is the same parameter."""
    found: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            for parameter in owner.parameters(recurse=False):
                found.setdefault(id(parameter), parameter)
    return list(found.values())
