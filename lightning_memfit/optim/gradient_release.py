"""Step each parameter during the backward pass and free its gradient at once (LOMO, Lv et al., 2023, arXiv 2306.09782).

All gradients together, which are as large as the weights, never exist at once. A parameter's gradient is complete when
autograd accumulates it, after every use of the parameter that has a gradient. Uses without one, of `weight.detach()` or
of a layer frozen in one branch, may be read later still: `GradientRelease.backward` looks for them before it steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_memfit.memory.breakdown import Category
from lightning_memfit.memory.host import copy_to_host
from lightning_memfit.optim.steps import Trial, narrowed, refuse_own_step, step_below_hooks

_SINGLE_PARAMETER = ("torch.optim.", "bitsandbytes.optim.", "torchao.optim.adam")
_WHOLE_MODEL = ("LBFGS",)
_KNOWN_ELSEWHERE = ("Lion", "Adafactor")
_OWN_STEP = "which would run once per parameter, without the gradients of the others"
_CHANGED_IN_PLACE = "modified by an inplace operation"
_READS_NO_VALUES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "is_same_size")


class GradientRelease:
    """Let backward passes step an optimizer, which keeps its states, groups, hooks and checkpoints.

    One backward pass is one step: gradients cannot be accumulated over several. The optimizer's `step`, called
    afterwards, finds no gradients and does nothing, so that training loops stay as they are.

    Parameters may be frozen, unfrozen and added to the optimizer at any time. Call `refresh` before the next forward
    pass; otherwise their first gradient is kept until `step`.

    Nothing that a backward pass does may read a parameter after the last of its gradient: run passes in `backward`.

    Args:
        optimizer: Must step each parameter independently of the others: any of torch (except LBFGS) and bitsandbytes,
            Adam and AdamW of torchao, and classes called Lion or Adafactor. `foreach` and `fused` work.
        clip_value: Clip each gradient element to this magnitude before the step.

    Raises:
        ValueError: If the optimizer is of another class, has a `step` or `zero_grad` of its own on the object or hooks
            that would see parameters of which some have stepped, or `clip_value` is not positive.
    """

    def __init__(self, optimizer: Optimizer, clip_value: float | None = None) -> None:
        refuse_coupled(optimizer)
        if clip_value is not None and clip_value <= 0:
            raise ValueError(f"`clip_value={clip_value}` must be positive.")
        self.clip_value = clip_value
        self.is_open = True
        """Whether a backward pass is a step. While it is not, one that reaches a parameter is refused."""
        self._optimizer = optimizer
        self._handles: dict[Tensor, Any] = {}
        self._places: dict[Tensor, tuple[int, int]] = {}
        """Index of each parameter's group, and its index within that."""
        self._stepped: set[int] = set()
        self._watch: _Watch | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []
        """Parameters with their gradients, in host memory, while a backward pass is watched."""
        self.refresh()
        self._step_handle: Any = optimizer.register_step_pre_hook(self._begin_step)

    @property
    def num_parameters(self) -> int:
        """Number of parameters that are stepped during backward; 0 after removal."""
        return len(self._handles)

    def serves(self, optimizer: Optimizer) -> bool:
        """Whether backward passes step this optimizer."""
        return self._optimizer is optimizer

    def refresh(self) -> None:
        """Follow parameters that were unfrozen or given to the optimizer since the last call, and no others.

        Raises:
            ValueError: If the optimizer has got a `step`, a `zero_grad` or hooks that the constructor refuses.
        """
        refuse_own_step(self._optimizer, _OWN_STEP)
        _refuse_hooks(self._optimizer)
        if "zero_grad" in vars(self._optimizer):
            raise ValueError(
                f"This {type(self._optimizer).__name__} has a `zero_grad` that was put on the object, which decides "
                "what gradients are before backward (zeros instead of None, for one), and released ones are gone. "
                "Leave it out, or do not release gradients."
            )
        self._places = {
            parameter: (index, place)
            for index, group in enumerate(self._optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        }
        for parameter in [parameter for parameter in self._handles if parameter not in self._places]:
            self._handles.pop(parameter).remove()
        new = [parameter for parameter in self._places if parameter.requires_grad and parameter not in self._handles]
        if any(is_lazy(parameter) for parameter in new):
            raise ValueError(
                "A parameter of the optimizer is one of a lazy module, which the first forward makes. Run one before "
                "training, as in `setup`, or do not release gradients."
            )
        if new:
            _refuse_shared_versions([*self._handles, *new])
        for parameter in new:
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._take)
        hooks = _hooks_of(self._optimizer._optimizer_step_pre_hooks, are_ours=True)
        self._pre_hooks = [hook for hook in hooks if hook != self._begin_step]
        self._post_hooks = _hooks_of(self._optimizer._optimizer_step_post_hooks, are_ours=True)

    def remove(self) -> None:
        """Take the hooks off. Safe to call twice."""
        self._step_handle.remove()
        while self._handles:
            self._handles.popitem()[1].remove()

    @contextmanager
    def backward(self, watched: bool, name_of: Callable[[Tensor], str]) -> Iterator[None]:
        """Run one backward pass inside, which is a step.

        Args:
            watched: Step when the pass is over, and only if no operator of it has read a parameter that would have been
                stepped before. Gradients wait in host memory, so that the device's needs no room for them.
            name_of: Gives a parameter's name.

        Raises:
            RuntimeError: If the pass reads what is stepped before. Where it is watched, no parameter has changed;
                elsewhere torch may find it, by the version of a saved tensor, when some have.
        """
        self.is_open = True
        self._watch = watch = _Watch() if watched else None
        try:
            with nullcontext() if watch is None else watch:
                yield
            if watch is not None:
                watch.refuse(name_of)
                self._step_waiting()
        except RuntimeError as error:
            if watch is None and self._stepped and _CHANGED_IN_PLACE in str(error):
                raise RuntimeError(
                    f"The backward pass reads a weight after its gradient is complete, when it is stepped. {_WHO_READS}"
                    " Earlier steps did not, and some weights have changed in this one: go on from a checkpoint."
                ) from error
            raise
        finally:
            self.is_open, self._watch = False, None
            self._waiting.clear()

    def _begin_step(self, *_: Any) -> None:
        self._stepped.clear()
        if self.clip_value is not None:  # gradients that came before their parameter was followed
            for group in self._optimizer.param_groups:
                left = [parameter for parameter in group["params"] if parameter.grad is not None]
                if left:
                    torch.nn.utils.clip_grad_value_(left, self.clip_value)

    def _take(self, parameter: Tensor) -> None:
        """Step a parameter whose gradient is complete, now or when the pass is over."""
        assert parameter.grad is not None
        if not self.is_open:
            raise RuntimeError(
                "A backward pass ran outside of the training loop's own, such as `loss.backward()` in `training_step`. "
                "Its gradients would step parameters, where a plain run clears or accumulates them. Use "
                "`torch.autograd.grad` there, or leave GradientRelease out."
            )
        if id(parameter) in self._stepped:
            raise RuntimeError(
                "A second gradient of a parameter came before `optimizer.step()`, from a second backward pass or a "
                "reentrant checkpoint (torch.utils.checkpoint) around a layer that is used elsewhere, too: gradients "
                "that are released cannot be accumulated. Use one backward pass per step, and `use_reentrant=False`."
            )
        self._stepped.add(id(parameter))
        if self._watch is None:
            self._step_and_release(parameter)
            return
        self._watch.complete(parameter)
        is_dense = parameter.grad.layout is torch.strided
        waiting = copy_to_host(parameter.grad, Category.GRADIENT) if is_dense else parameter.grad
        self._waiting.append((parameter, waiting))
        parameter.grad = None

    def _step_waiting(self) -> None:
        """Step in the order in which gradients were complete, as passes that are not watched do."""
        self._waiting.reverse()
        while self._waiting:
            parameter, gradient = self._waiting.pop()
            parameter.grad = gradient.to(parameter.device)
            del gradient
            self._step_and_release(parameter)

    def _step_and_release(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self.clip_value is not None:
            parameter.grad.clamp_(-self.clip_value, self.clip_value)
        # Made anew each time: schedules change the group's values between steps.
        group = {**self._optimizer.param_groups[self._places[parameter][0]], "params": [parameter]}
        with narrowed(self._optimizer, [group], self._places):
            self._run_step()
        # Kernels of bitsandbytes write past torch, which then would not notice that saved tensors have changed.
        increment_version(parameter)
        parameter.grad = None

    def _run_step(self) -> None:
        """Run a step with this package's own hooks; those of others see the step as a whole."""
        arguments: tuple[Any, ...] = self._optimizer, (self._optimizer,), {}
        for hook in self._pre_hooks:
            hook(*arguments)
        step_below_hooks(self._optimizer)
        for hook in self._post_hooks:
            hook(*arguments)


_WHO_READS = (
    "Something uses it without a gradient: `weight.detach()` or `weight.data`, a layer frozen for one branch, a "
    "checkpoint's function or a hook. Use a copy there (`weight.detach().clone()`), or leave GradientRelease out."
)


class _Watch(TorchDispatchMode):
    """Notice operators of a backward pass that read, or write, parameters whose gradient is complete."""

    supports_higher_order_operators = True

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions be compiled here as elsewhere (asked by torch 2.10 and later)."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._complete: dict[int, list[Tensor]] = {}
        """Parameters by the storage that they lie in, which may have room for others (recurrent layers of cuDNN)."""
        self._found: tuple[Tensor, str] | None = None

    def complete(self, parameter: Tensor) -> None:
        """Look for this parameter from now on."""
        self._look_at(parameter, "the optimizer's step of another parameter in the same memory")
        storage = _storage_of(parameter)
        if storage is not None:
            self._complete.setdefault(storage, []).append(parameter)

    def refuse(self, name_of: Callable[[Tensor], str]) -> None:
        """Raise a `RuntimeError` if something was found."""
        if self._found is not None:
            parameter, reader = self._found
            raise RuntimeError(
                f"The backward pass reads {name_of(parameter)} (in {reader}) after its gradient is complete, when it "
                f"would be stepped already. {_WHO_READS} No weight has changed in this step."
            )

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._complete and self._found is None and not getattr(func, "is_view", False):
            packet = getattr(func, "overloadpacket", func)  # an operator of higher order has no overloads
            if getattr(packet, "__name__", "") not in _READS_NO_VALUES:
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor):
                        self._look_at(leaf, str(func))
        return func(*args, **(kwargs or {}))

    def _look_at(self, tensor: Tensor, reader: str) -> None:
        storage = _storage_of(tensor)
        for parameter in self._complete.get(storage, ()) if storage is not None else ():
            (start, end), (first, last) = _span(parameter), _span(tensor)
            if start < last and first < end:
                self._found = (parameter, reader)


def _refuse_shared_versions(parameters: Iterable[Tensor]) -> None:
    """Raise a `ValueError` if torch takes a step of one parameter for a change of another one, too."""
    places: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        storage = _storage_of(parameter)
        others = [] if storage is None else places.setdefault(storage, [])
        for other in others:
            before = other._version
            increment_version(parameter)
            if other._version != before:
                raise ValueError(
                    f"Two parameters, of shape {tuple(other.shape)} and {tuple(parameter.shape)}, are views of one "
                    "tensor: to torch, a step of one makes what is saved of the other invalid. Make each a tensor of "
                    "its own (`nn.Parameter(view.clone())`), or do not release gradients."
                )
        others.append(parameter)


def _storage_of(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have none
        return None


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches over."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return begin, begin
    reach = 1 + sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + reach * tensor.itemsize


def _refuse_hooks(optimizer: Optimizer) -> None:
    """Raise a `ValueError` if other code than this package has hooks around the optimizer's step."""
    name = type(optimizer).__name__
    of_every = (*_hooks_of(_global_optimizer_pre_hooks, False), *_hooks_of(_global_optimizer_post_hooks, False))
    hooks = {
        f"The optimizer ({name}) has a hook around its step": (
            *_hooks_of(optimizer._optimizer_step_pre_hooks, False),
            *_hooks_of(optimizer._optimizer_step_post_hooks, False),
        ),
        # Torch's own counts steps for a profiler.
        "There is a hook around the step of every optimizer": [h for h in of_every if _package_of(h) != "torch"],
    }
    for found, own in hooks.items():
        for hook in own:
            raise ValueError(
                f"{found}, `{getattr(hook, '__qualname__', type(hook).__name__)}`, that would find parameters stepped "
                "already and no gradients. Remove it, or do not release gradients."
            )


def _hooks_of(hooks: Mapping[int, Any], are_ours: bool) -> list[Any]:
    """Hooks of this package, or those of others."""
    return [hook for hook in hooks.values() if (_package_of(hook) == _package_of(_hooks_of)) is are_ours]


def _package_of(hook: Any) -> str:
    return (getattr(hook, "__module__", None) or "").partition(".")[0]


def refuse_coupled(optimizer: Optimizer, what: str = "releasing gradients during backward") -> None:
    """Raise a `ValueError` unless it is known that the optimizer steps each parameter independently of the others.

    Args:
        optimizer: The optimizer.
        what: What needs that, for the message.
    """
    stepped: Any = getattr(optimizer, "wrapped", optimizer)  # inside `Float32Step`, which steps those with a gradient
    cls = type(stepped)
    is_of_known = cls.__module__.startswith(_SINGLE_PARAMETER)
    known = is_of_known or (cls.__name__ in _KNOWN_ELSEWHERE and _steps_apart(stepped))
    if not known or cls.__name__ in _WHOLE_MODEL:
        raise ValueError(
            f"`{cls.__module__}.{cls.__name__}` is not known to step each parameter independently of the others, which "
            f"{what} needs. Use an optimizer of torch.optim (but LBFGS), bitsandbytes or "
            "torchao's Adam, Lion or Adafactor."
        )


@_disable_current_modes()  # in a trace, a trial has values all the same
def _steps_apart(optimizer: Optimizer) -> bool:
    """Whether a step of each parameter by itself does what a step of all does; True of what can't be tried.

    A class may clip by the norm of all gradients, or count steps in its groups or in itself.
    """
    for group in optimizer.param_groups:
        trial = Trial(optimizer, group)
        together, apart = trial.stepped(), trial.stepped(apart=True)
        if together is None or apart is None:
            continue
        if not all(torch.equal(one, other) for one, other in zip(together, apart, strict=True)):
            return False
    return True
