"""Everything a trial step may touch, kept and put back bitwise.

`TrainingSnapshot` is for probing: after `restore`, the run that follows is the run that would have been without the
probe. `OptimizerSnapshot` is the part an optimizer step changes.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memfit.fitting.host import HostCopy
from lightning_memfit.fitting.random_state import RandomState

_MAX_WALKED_ITEMS = 1000
_MAX_WALKED_DEPTH = 4
_MODULE_INTERNALS = frozenset(vars(nn.Module())) | {"_trainer", "_fabric", "_log_hyperparams", "_metric_attributes"}


class OptimizerSnapshot:
    """Parameters of an optimizer, its states, hyper-parameters and own attributes.

    Tensors keep their identity on restoring. States that did not exist are removed again.

    Args:
        optimizer: The optimizer. Its parameters and states are copied to host memory.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(p, HostCopy(p)) for group in optimizer.param_groups for p in group["params"]]
        self._states = [(p, _Values(dict(state))) for p, state in optimizer.state.items()]
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._group_tensors = [(v, HostCopy(v)) for group in self._groups for v in group.values() if _is_tensor(v)]
        self._attributes = dict(vars(optimizer))

    def restore(self) -> None:
        """Put everything back."""
        optimizer = self._optimizer
        for parameter, copy in self._parameters:
            copy.restore(parameter)
        for tensor, copy in self._group_tensors:
            copy.restore(tensor)
        optimizer.state.clear()
        for parameter, values in self._states:
            optimizer.state[parameter] = values.restored()
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            for key in [key for key in group if key != "params" and key not in saved]:
                del group[key]
            group.update(saved)
        _restore_dict(vars(optimizer), self._attributes)


class TrainingSnapshot:
    """All state of a module in training: what trial steps on it may change.

    Parameters, buffers (also those not in `state_dict`), gradients, optimizers, LR schedulers, the gradient scaler,
    random generators, the modules' Python attributes (metric states among them), training flags, and cuDNN's switches.
    Objects the module merely refers to (trainer, datasets, open files) are not copied.

    Args:
        module: The module in training.
        optimizers: Its optimizers.
        device: The device in use.
        others: Further plain objects whose attributes may change: schedulers, the gradient scaler.
        with_parameters: False where only forward passes are tried, which leave parameters and gradients alone.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer],
        device: torch.device,
        others: Iterable[object] = (),
        with_parameters: bool = True,
    ) -> None:
        self._random = RandomState(device)
        self._optimizers = [OptimizerSnapshot(optimizer) for optimizer in optimizers]
        stepped = {id(p) for snapshot in self._optimizers for p, _ in snapshot._parameters}
        parameters = list(module.parameters()) if with_parameters else []
        self._parameters = [(p, HostCopy(p)) for p in parameters if id(p) not in stepped]
        self._flags = [(p, p.requires_grad) for p in parameters]
        self._gradients = [(p, p.grad, None if p.grad is None else HostCopy(p.grad)) for p in parameters]
        self._modules = [(child, _Values(dict(child._buffers)), _attributes(child)) for child in module.modules()]
        self._others = [(vars(other), _Values(dict(vars(other)))) for other in others]
        cudnn = torch.backends.cudnn
        self._cudnn = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)

    def restore(self) -> None:
        """Put everything back."""
        for snapshot in self._optimizers:
            snapshot.restore()
        for parameter, copy in self._parameters:
            copy.restore(parameter)
        for parameter, requires_grad in self._flags:
            parameter.requires_grad_(requires_grad)
        for parameter, grad, grad_copy in self._gradients:
            parameter.grad = grad
            if grad is not None and grad_copy is not None:
                grad_copy.restore(grad)
        for child, buffers, attributes in self._modules:
            _restore_dict(child._buffers, buffers.restored())
            _restore_dict(vars(child), attributes.restored(), keep=_MODULE_INTERNALS - {"training"})
        for target, values in self._others:
            _restore_dict(target, values.restored())
        cudnn = torch.backends.cudnn
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = self._cudnn
        self._random.restore()


class _Values:
    """A dict of attributes with the contents of tensors, arrays and plain containers in it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {key: (value, _content(value)) for key, value in values.items()}

    def restored(self) -> dict[str, Any]:
        """The same objects with the contents they had."""
        return {key: _with_content(value, content) for key, (value, content) in self._values.items()}


def _attributes(module: nn.Module) -> _Values:
    return _Values({k: v for k, v in vars(module).items() if k not in _MODULE_INTERNALS or k == "training"})


def _content(value: Any, depth: int = 0) -> Any:
    if _is_tensor(value):
        return HostCopy(value)
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        # Items of long or deep containers (a data set kept on the module) are taken as they are.
        walk = _content if len(value) <= _MAX_WALKED_ITEMS and depth < _MAX_WALKED_DEPTH else _nothing
        if isinstance(value, dict):
            return [(key, item, walk(item, depth + 1)) for key, item in value.items()]
        return [(item, walk(item, depth + 1)) for item in value]
    if type(value).__module__ == "numpy" and hasattr(value, "copy") and hasattr(value, "flags"):
        return value.copy()
    return None


def _nothing(value: Any, depth: int) -> None:
    return None


def _with_content(value: Any, content: Any) -> Any:
    if content is None:
        return value
    if isinstance(content, HostCopy):
        content.restore(value)
    elif isinstance(value, dict):
        items = {key: _with_content(item, inner) for key, item, inner in content}
        _restore_dict(value, items)
    elif isinstance(value, (tuple, frozenset)):
        for item, inner in content:
            _with_content(item, inner)
    elif isinstance(value, list):
        value[:] = [_with_content(item, inner) for item, inner in content]
    elif isinstance(content, list):  # set, deque
        value.clear()
        extend = value.update if isinstance(value, set) else value.extend
        extend([_with_content(item, inner) for item, inner in content])
    else:
        value[...] = content
    return value


def _restore_dict(target: dict[Any, Any], values: dict[Any, Any], keep: frozenset[str] = frozenset()) -> None:
    for key in [key for key in target if key not in values and key not in keep]:
        del target[key]
    for key, value in values.items():
        if key not in target or target[key] is not value:
            target[key] = value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
