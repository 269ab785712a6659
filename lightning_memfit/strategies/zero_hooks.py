"""`HooksUnderZero`: what a user's hooks do to weights and gradients takes effect under ZeRO, or is refused.

DeepSpeed steps master weights of its own and keeps gradients in buffers of its own. What a hook of the module or of a
callback writes into a weight is overwritten by the next step; a gradient that it asks for is None; and with stage 3 a
weight that no layer is computing with has no elements, with which every operation succeeds and does nothing.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_memfit.memory.wrapping import wrap_method

_HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "on_train_batch_end",
    "on_train_epoch_end",
)
"""Hooks between the start and the end of training in which a user may touch weights and gradients."""

_ABOUT = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "grad_fn", "is_meta")
} | {torch.Tensor.dim, torch.Tensor.requires_grad_, torch.Tensor.is_floating_point, torch.Tensor.__hash__}
"""What can be asked of a weight whose elements are put away."""

_attributes: Any = torch.Tensor
_GRAD, _DATA, _SET_DATA = _attributes.grad.__get__, _attributes.data.__get__, _attributes.data.__set__

_OF_THE_RUN = (
    "deepspeed.",
    "lightning.fabric.strategies.",
    "lightning.pytorch.strategies.",
    "lightning.pytorch.trainer.",
    "lightning_memfit.",
)
"""Modules that may look at weights that are put away."""


class Passes:
    """Which weights take part in the backward passes of an accumulation, where that matters: under ZeRO-1.

    Args:
        module: The module that is trained.
    """

    def __init__(self, module: LightningModule) -> None:
        self._now: set[str] = set()
        self._earlier: set[str] = set()
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self._handles = [one.register_hook(partial(self._see, name)) for name, one in named]

    def _see(self, name: str, gradient: torch.Tensor) -> None:
        self._now.add(name)

    def end(self, is_last: bool) -> None:
        """A pass has ended.

        Args:
            is_last: Whether it was the last of its accumulation, after which weights are stepped.

        Raises:
            MisconfigurationException: If the gradient of a weight would be lost.
        """
        lost = sorted(self._earlier - self._now) if is_last else []
        self._earlier = set() if is_last else self._earlier | self._now
        self._now.clear()
        if lost:
            raise MisconfigurationException(
                f"`{lost[0]}` takes part in an earlier batch of an accumulation, and not in its last one, in which "
                "alone ZeRO-1 sums gradients over the ranks: its gradient would be lost. Use `strategy="
                "memfit_zero_2`, or `accumulate_grad_batches=1`."
            )

    def detach(self) -> None:
        """Look no more."""
        while self._handles:
            self._handles.pop().remove()


class HooksUnderZero:
    """Looks at what hooks do with the weights that DeepSpeed trains.

    Args:
        trainer: The trainer, whose module and callbacks have the hooks.
        stepped: Weights that DeepSpeed steps.
        in_parts: Whether weights are put away while no layer uses them, as stage 3 does.

    Raises:
        MisconfigurationException: Later, in a hook that asks for a gradient or uses a weight that is put away.
    """

    def __init__(self, trainer: Trainer, stepped: Iterable[torch.nn.Parameter], in_parts: bool) -> None:
        module = trainer.lightning_module
        self._in_parts = in_parts
        self._parameters = dict(module.named_parameters())
        self._stepped = {id(one) for one in stepped}
        self._names = {id(one): name for name, one in self._parameters.items() if in_parts or id(one) in self._stepped}
        self._undo: list[Callable[[], None]] = []
        for owner in (module, *trainer.callbacks):  # type: ignore[attr-defined]
            for name in _HOOKS:
                if _is_users(owner, name):
                    self._watch(owner, name)
        if in_parts:
            unwatch = self._watch(module, "training_step", lambda: unwatch())

    def detach(self) -> None:
        """Give the hooks back."""
        while self._undo:
            self._undo.pop()()

    def _watch(self, owner: Any, name: str, then: Callable[[], None] | None = None) -> Callable[[], None]:
        undo = wrap_method(owner, name, partial(self._run, f"{type(owner).__name__}.{name}", then))
        self._undo.append(undo)
        return undo

    def _run(
        self, where: str, then: Callable[[], None] | None, hook: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a hook that goes by a name, and `then`; what it has written goes to the master weights."""
        touches = _Touches(self._names, self._stepped, where, self._in_parts)
        with touches:
            result = hook(*args, **kwargs)
        if then is not None:  # a step, which reads weights alone
            then()
            return result
        for parameter, is_certain in touches.written():
            if id(parameter) in self._stepped:
                _write_master(parameter, is_certain, f"`{where}` writes `{self._names[id(parameter)]}`")
        return result


def _is_users(owner: Any, name: str) -> bool:
    if type(owner).__module__.partition(".")[0] == "lightning_memfit" and not isinstance(owner, LightningModule):
        return False
    return is_overridden(name, owner, LightningModule if isinstance(owner, LightningModule) else Callback)


class _Touches(TorchFunctionMode):
    """Sees every function that is called with a weight.

    Args:
        names: Names of the weights, by their identity.
        stepped: Identities of those that DeepSpeed steps.
        where: The code that runs.
        in_parts: Whether weights are put away.
    """

    def __init__(self, names: dict[int, str], stepped: set[int], where: str, in_parts: bool) -> None:
        super().__init__()
        self._names = names
        self._stepped = stepped
        self._where = where
        self._in_parts = in_parts
        self._versions: dict[int, tuple[Any, int]] = {}
        self._aliases: list[tuple[Any, Any]] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weights = [one for one in _flat((args, kwargs)) if id(one) in self._names]
        if not weights or func in _ABOUT:
            return func(*args, **kwargs)
        weight, name = weights[0], self._names[id(weights[0])]
        if self._in_parts:
            empty = next((one for one in weights if one.numel() == 0 and getattr(one, "ds_numel", 0)), None)
            if empty is not None and _is_users_call():
                raise MisconfigurationException(
                    f"`{self._where}` uses `{self._names[id(empty)]}`, which ZeRO-3 has put away: outside of its "
                    "layer's `forward` it has no elements. Use it in a hook within `with deepspeed.zero."
                    "GatheredParameters(parameters, modifier_rank=0):`, or train with `strategy=memfit_fsdp2` or "
                    "`memfit_zero_2`."
                )
        for one in weights:
            self._versions.setdefault(id(one), (one, one._version))
        if func == _SET_DATA and _is_users_call():  # it must stay where DeepSpeed has it
            weight.detach().copy_(args[1])
            return None
        result = func(*args, **kwargs)
        if func == _GRAD and result is None and id(weight) in self._stepped and _is_users_call():
            raise MisconfigurationException(
                f"`{self._where}` reads the gradient of `{name}`, which ZeRO keeps in parts of its own: it is None "
                "here, and what is done to it would be lost. Read it by `deepspeed.utils.safe_get_full_grad`, or train "
                "with `strategy=memfit_fsdp2` or `memfit_ddp`."
            )
        if func == _DATA and _is_users_call():
            self._aliases.append((weight, result))
        return result

    def written(self) -> list[tuple[Any, bool]]:
        """Weights that were written, and for certain; or that were gathered for a while, perhaps to be written."""
        seen = {key: (weight, weight._version != version) for key, (weight, version) in self._versions.items()}
        seen |= {id(weight): (weight, True) for weight, alias in self._aliases if alias._version}
        return [(weight, is_certain) for weight, is_certain in seen.values() if is_certain or not weight.numel()]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _is_users_call() -> bool:
    """Whether the user's own code, or a callback's, is at work, and no checkpoint or gathering that it has started."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not HooksUnderZero._run.__code__:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OF_THE_RUN) and name != __name__:
            return False
        frame = frame.f_back
    return True


def _write_master(parameter: Any, is_certain: bool, what: str) -> None:
    """Take what was written into a weight over into the master weights, and into what stage 3 gathers it from."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        safe_set_full_fp32_param(parameter, parameter.detach().float())
        return
    if part.ds_numel != part.numel():  # on disk
        if is_certain:
            raise MisconfigurationException(
                f"{what}, which is on disk, where it can't be changed in a hook. Train with `offload_parameters=False`."
            )
        return
    if parameter.numel():
        safe_set_full_fp32_param(parameter, parameter.detach().float())
        part.detach().copy_(safe_get_local_fp32_param(parameter).view_as(part))
        return
    master = safe_get_local_fp32_param(parameter)  # the weight was gathered for a while
    if not torch.equal(part.detach(), master.view_as(part).to(part.dtype)):
        safe_set_local_fp32_param(parameter, part.detach().float())
