"""`HooksUnderZero`: what a user's hooks do to weights and gradients takes effect under ZeRO, or is refused.

`WholeInBuilds` does the same for what `configure_model` does to weights that are put away as soon as they are made.

DeepSpeed steps master weights of its own and keeps gradients in buffers of its own. What a hook of the module or of a
callback writes into a weight is overwritten by the next step; a gradient that it asks for is None; and with stage 3 a
weight that no layer is computing with has no elements, with which every operation succeeds and does nothing.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_memfit.memory.collectives import gathered
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.strategies.upstream.huggingface import is_loading_pretrained

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
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
)
"""Hooks between the start and the end of training in which a user may touch weights and gradients."""

_ABOUT = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "_version",
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "ndim",
        "layout",
        "grad_fn",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "itemsize",
    )
} | {
    torch.Tensor.__hash__,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.is_complex,
    torch.Tensor.is_floating_point,
    torch.Tensor.register_hook,
    torch.Tensor.requires_grad_,
}
"""What can be asked of a weight whose elements are put away; not how many it has, as there are none (`numel`)."""

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


_SIZES = {getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim")} | {
    getattr(torch.Tensor, name) for name in ("dim", "ndimension", "nelement", "numel", "size", "__len__")
}
"""What a weight that is put away can tell of its elements."""


class WholeInBuilds(TorchFunctionMode):
    """Gives code that builds a module whole weights, while ZeRO-3 puts them away as soon as their layer is made.

    They look empty then: `nn.init.zeros_(layer.weight)` would succeed and do nothing. What is called with such a weight
    runs while all ranks have it whole, and what the first rank writes counts. A view of one, such as `weight.data`,
    keeps it whole for as long as there is the view, at most until the module is built.
    """

    def __init__(self) -> None:
        super().__init__()
        self._viewed: list[tuple[ExitStack, list[weakref.ref[torch.Tensor]]]] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        away = {id(one): one for one in _flat((args, kwargs)) if getattr(one, "ds_status", None) is not None}
        away = {key: one for key, one in away.items() if one.ds_status.name == "NOT_AVAILABLE"}
        if not away or (func in _ABOUT and func not in _SIZES) or is_loading_pretrained() or not _is_of_build():
            return func(*args, **kwargs)
        weight = next(iter(away.values()))
        if func in _SIZES:  # which one rank may ask for alone
            return func(torch.empty(weight.ds_shape, dtype=weight.dtype, device="meta"), *args[1:], **kwargs)
        self._put_away(lambda views: all(view() is None for view in views))
        with ExitStack() as stack:
            stack.enter_context(gathered(away.values(), modifier_rank=0))
            if func == _SET_DATA:  # it must stay where DeepSpeed has it
                with torch.no_grad():
                    weight.copy_(args[1])
                return None
            result = func(*args, **kwargs)
            made = [one for one in _flat(result) if isinstance(one, torch.Tensor) and id(one) not in away]
            views = [weakref.ref(one) for one in made if any(_shares(one, whole) for whole in away.values())]
            if views:
                self._viewed.append((stack.pop_all(), views))
        return result

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._put_away(lambda views: True)

    def _put_away(self, is_over: "Callable[[list[weakref.ref[torch.Tensor]]], bool]") -> None:
        """Put weights away whose views are no longer of use."""
        viewed, self._viewed = self._viewed, []
        for stack, views in viewed:
            if is_over(views):
                stack.close()
            else:
                self._viewed.append((stack, views))


def _is_of_build() -> bool:
    """Whether an operation is called for the user, and not by DeepSpeed's or this package's own work with weights.

    DeepSpeed wraps the constructors of modules, and so stands above what those of torch write (`nn.Transformer`).
    """
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return True
        frame = frame.f_back
    return frame is None or not frame.f_globals.get("__name__", "").startswith(_OF_WEIGHTS)


_OF_WEIGHTS = ("deepspeed.", "lightning_memfit.memory.", "lightning_memfit.strategies.")
"""Modules that put weights away and gather them."""


class Passes:
    """Which weights take part in the backward passes of an accumulation, where that matters: under ZeRO-1.

    Args:
        module: The module that is trained.
        zero: DeepSpeed's optimizer, whose `zero_grad` begins a new accumulation.
    """

    def __init__(self, module: LightningModule, zero: Any) -> None:
        self._now: set[str] = set()
        self._earlier: set[str] = set()
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self._handles = [one.register_hook(partial(self._see, name)) for name, one in named]
        self._unwrap = wrap_method(zero, "zero_grad", self._zero_grad)

    def _zero_grad(self, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._earlier.clear()
        zero_grad(*args, **kwargs)

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
                f"`{lost[0]}` takes part in an earlier batch (or micro-batch) of an accumulation, and not in its last "
                "one, in which alone ZeRO-1 sums gradients over the ranks as they come: its gradient would be lost. "
                "Use `strategy=memfit_zero_2`, or `ZeroStrategy(stage=1, config={'zero_optimization': {'overlap_comm': "
                "False}})`, or accumulate nothing."
            )

    def detach(self) -> None:
        """Look no more."""
        self._unwrap()
        while self._handles:
            self._handles.pop().remove()


class HooksUnderZero:
    """Looks at what a user's code does with the weights that DeepSpeed trains.

    A write in place is found by the weight's version, wherever it was done; DeepSpeed's own work leaves versions alone.
    Writes past it (`weight.data`), uses of weights that are put away, and gradients are seen in hooks, in every step by
    hand, and in the first `training_step`, unless a compiled module would have to be compiled for that alone.

    Args:
        trainer: The trainer, whose module and callbacks have the hooks.
        stepped: Weights that DeepSpeed steps.
        in_parts: Whether weights are put away while no layer uses them, as stage 3 does.

    Raises:
        MisconfigurationException: Later, in a hook that asks for a gradient or uses a weight that is put away.
    """

    def __init__(self, trainer: Trainer, stepped: Iterable[torch.nn.Parameter], in_parts: bool) -> None:
        module = trainer.lightning_module
        self.in_parts = in_parts
        self.stepped = {id(one) for one in stepped}
        named = [(name, one) for name, one in module.named_parameters() if in_parts or id(one) in self.stepped]
        self.names = {id(one): name for name, one in named}
        self.versions: dict[int, int] = {}
        self._weights = [one for _, one in named]
        self.active: list[_Touches] = []
        self._undo: list[Callable[[], None]] = []
        self.note()
        for owner in (module, *trainer.callbacks):  # type: ignore[attr-defined]
            for name in _HOOKS:
                if _is_users(owner, name):
                    self._watch(owner, name)
        if is_overridden("optimizer_step", module, LightningModule):
            self._watch(module, "optimizer_step", _always)
        if not module.automatic_optimization:
            self._watch(module, "training_step", _always)
        elif in_parts or not _is_compiled(module):
            self._watch(module, "training_step", lambda touches: touches.may_write)

    def detach(self) -> None:
        """Give the hooks back."""
        while self._undo:
            self._undo.pop()()

    def note(self) -> None:
        """Weights are now what the masters have."""
        self.versions.update((id(one), one._version) for one in self._weights)

    def take(self, where: str = "the module or a callback") -> None:
        """Take what was written into weights over into the masters: before they are stepped or saved."""
        with torch._C.DisableTorchFunction():
            written = {id(one): one for one in self._weights if one._version != self.versions[id(one)]}
            for touches in self.active:
                written |= {id(one): one for one in touches.take_aliased()}
            for key, parameter in written.items():
                self.versions[key] = parameter._version
                what = f"`{where}` writes `{self.names[key]}`"
                if key in self.stepped:
                    _write_master(parameter, True, what)
                elif self.in_parts:
                    _write_part(parameter, what)

    def _watch(self, owner: Any, name: str, goes_on: "Callable[[_Touches], bool] | None" = None) -> None:
        where = f"{type(owner).__name__}.{name}"
        undo = wrap_method(owner, name, lambda *args, **kwargs: self._run(where, goes_on, undo, *args, **kwargs))
        self._undo.append(undo)

    def _run(
        self,
        where: str,
        goes_on: "Callable[[_Touches], bool] | None",
        undo: Callable[[], None],
        hook: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a hook that goes by a name, or a step, which is seen once more as long as `goes_on` says so."""
        touches = _Touches(self, where)
        self.active.append(touches)
        try:
            with touches:
                result = hook(*args, **kwargs)
            self.take(where)
        finally:
            self.active.remove(touches)
        if goes_on is not None:  # a step, whose layers use all weights
            if not goes_on(touches):
                undo()
            return result
        for parameter in touches.put_away():
            if id(parameter) in self.stepped:
                _write_master(parameter, False, f"`{where}` writes `{self.names[id(parameter)]}`")
        return result


def _always(touches: Any) -> bool:
    return True


def _is_compiled(module: torch.nn.Module) -> bool:
    return any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in module.modules())


def _is_users(owner: Any, name: str) -> bool:
    if type(owner).__module__.partition(".")[0] == "lightning_memfit" and not isinstance(owner, LightningModule):
        return False
    return is_overridden(name, owner, LightningModule if isinstance(owner, LightningModule) else Callback)


class _Touches(TorchFunctionMode):
    """Sees every function that is called with a weight.

    Args:
        hooks: What knows the weights.
        where: The code that runs.
    """

    def __init__(self, hooks: HooksUnderZero, where: str) -> None:
        super().__init__()
        self._hooks = hooks
        self._where = where
        self._touched: dict[int, Any] = {}
        self._aliases: dict[int, tuple[Any, Callable[[], Any], int]] = {}
        """Weights, what shares their elements, and its version, by the identity of the latter."""
        self.may_write = False
        """Whether it has written weights, or reached past their versions."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._hooks.active[-1] is not self:
            return func(*args, **kwargs)
        names, in_parts = self._hooks.names, self._hooks.in_parts
        given = [one for one in _flat((args, kwargs)) if id(one) in names or id(one) in self._aliases]
        if not given or func in _ABOUT:
            return func(*args, **kwargs)
        weights = [one for one in given if id(one) in names]
        if func == _GRAD and sys._getframe(1).f_code is torch.nn.Module.zero_grad.__code__ and _is_users_call():
            raise MisconfigurationException(
                f"`{self._where}` clears the gradient of `{names[id(given[0])]}` by a layer's `zero_grad`: ZeRO keeps "
                "the gradients of all weights together, and can clear all of them only. Use `self.zero_grad()` or "
                "`self.optimizers().zero_grad()`, or train with `strategy=memfit_fsdp2` or `memfit_ddp`."
            )
        self._touched |= {id(one): one for one in weights}
        if in_parts:
            self._refuse_put_away(weights)
        if func == _SET_DATA and weights and _is_users_call():  # it must stay where DeepSpeed has it
            weights[0].detach().copy_(args[1])
            self._hooks.take(self._where)
            return None
        result = func(*args, **kwargs)
        if func == _GRAD and id(given[0]) in self._hooks.stepped and _is_users_call():
            raise MisconfigurationException(
                f"`{self._where}` reads the gradient of `{names[id(given[0])]}`, which ZeRO keeps in parts of its own: "
                "here it is None or this rank's alone, and what is done to it would be lost. Read it by `deepspeed."
                "utils.safe_get_full_grad`, clip by `self.clip_gradients` or the Trainer, or train with `strategy="
                "memfit_fsdp2` or `memfit_ddp`."
            )
        if in_parts:
            self._take_now(given)
        if isinstance(result, torch.Tensor) and result is not given[0]:
            if func == _DATA and _is_users_call():
                self.may_write = True
                self._follow(given[0], result)
            elif in_parts and not torch.is_grad_enabled() and _shares(result, given[0]) and _is_users_call():
                self._follow(given[0], result)
        return result

    def _refuse_put_away(self, weights: list[Any]) -> None:
        empty = next((one for one in weights if one.numel() == 0 and getattr(one, "ds_numel", 0)), None)
        if empty is not None and _is_users_call():
            raise MisconfigurationException(
                f"`{self._where}` uses `{self._hooks.names[id(empty)]}`, which ZeRO-3 has put away: outside of its "
                "layer's `forward` it has no elements. Use it in a hook within `with deepspeed.zero."
                "GatheredParameters(parameters, modifier_rank=0):`, or train with `strategy=memfit_fsdp2` or "
                "`memfit_zero_2`."
            )

    def _take_now(self, given: list[Any]) -> None:
        """Take a write over while the weight is whole."""
        versions = self._hooks.versions
        known = [(one, self._aliases[id(one)][2] if id(one) in self._aliases else versions[id(one)]) for one in given]
        if any(one._version != version for one, version in known):
            self.may_write = True
            self._hooks.take(self._where)

    def _follow(self, given: Any, result: Any) -> None:
        """Look out for writes into what shares a weight's elements."""
        weight, key = self._aliases[id(given)][0] if id(given) in self._aliases else given, id(result)
        if self._hooks.in_parts:  # whose writes are taken at once, and whose memory must be freed
            alias: Callable[[], Any] = weakref.ref(result, lambda _: self._aliases.pop(key, None))
        else:
            alias = partial(_itself, result)
        self._aliases[key] = (weight, alias, result._version)

    def take_aliased(self) -> list[Any]:
        """Weights that were written by what shares their elements since the last call."""
        living = [(key, weight, alias, alias(), version) for key, (weight, alias, version) in self._aliases.items()]
        self._aliases.update(
            (key, (weight, alias, one._version)) for key, weight, alias, one, _ in living if one is not None
        )
        return [weight for _, weight, _, one, version in living if one is not None and one._version != version]

    def put_away(self) -> list[Any]:
        """Weights that were used and are put away now: they were gathered for a while, perhaps to be written."""
        with torch._C.DisableTorchFunction():
            return [weight for weight in self._touched.values() if not weight.numel()]


_LOST = (
    "{}, which ZeRO-3 has put away since, so that it is lost. Write it in a hook within `with deepspeed.zero."
    "GatheredParameters(parameters, modifier_rank=0):`, or train with `strategy=memfit_fsdp2` or `memfit_zero_2`."
)


def _itself(value: Any) -> Any:
    return value


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.numel()) and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


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
    """Take what was written into a weight over into the master weights, and into what stage 3 gathers it from.

    Elements that are what the master rounds to were not written; they keep the master's digits.
    """
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        fragment = parameter._hp_mapping
        if fragment is not None:  # of which this rank has some
            address = fragment.lp_fragment_address
            _take_changed(parameter.detach().flatten()[address.start :][: address.numel], fragment.get_hp_fragment())
        return
    if part.ds_numel != part.numel():  # on disk
        if is_certain:
            raise MisconfigurationException(
                f"{what}, which is on disk, where it can't be changed in a hook. Train with `offload_parameters=False`."
            )
        return
    with _unfrozen(parameter):
        master = safe_get_local_fp32_param(parameter)
        if parameter.numel():
            own = _own(parameter)
            _take_changed(own, master.view(-1)[: own.numel()])
            safe_set_local_fp32_param(parameter, master)
            part.detach().view(-1)[: own.numel()].copy_(own)
        elif not torch.equal(part.detach(), master.view_as(part).to(part.dtype)):
            safe_set_local_fp32_param(parameter, part.detach().float())
        elif is_certain:
            raise MisconfigurationException(_LOST.format(what))


@contextmanager
def _unfrozen(parameter: torch.Tensor) -> Iterator[None]:
    """DeepSpeed knows the master of a weight while it has `requires_grad`, which a hook may have taken away."""
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(before)


def _write_part(parameter: Any, what: str) -> None:
    """Take what was written into a weight that isn't stepped over into what stage 3 gathers it from."""
    part = parameter.ds_tensor
    if part.ds_numel != part.numel() or not parameter.numel():
        raise MisconfigurationException(_LOST.format(what))
    own = _own(parameter)
    part.detach().view(-1)[: own.numel()].copy_(own)


def _own(parameter: Any) -> torch.Tensor:
    """This rank's elements of a weight that is whole; the last rank has fewer."""
    size = parameter.ds_tensor.numel()
    elements: torch.Tensor = parameter.detach().flatten()
    return elements[size * torch.distributed.get_rank(parameter.ds_process_group) :][:size]


def _take_changed(written: torch.Tensor, master: torch.Tensor) -> None:
    written = written.to(master.device)
    master.data.copy_(torch.where(written != master.to(written.dtype), written.to(master.dtype), master))
