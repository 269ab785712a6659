"""Torchmetrics objects of a module across the micro-batches of a step."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric


class StepMetrics:
    """Keep the metrics of a module exact: every sample counted once, step values over the whole batch.

    `metric(preds, target)` returns, and `self.log(name, metric, on_step=True)` logs, the value over the last call,
    which is one micro-batch. A second copy of each metric so logged sees all micro-batches of a step and supplies the
    value.

    Args:
        module: Where the metrics are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._shadows: dict[int, Metric] = {}
        self._handles: list[Any] = []
        self._on_step: set[int] | None = None

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def save(self) -> list[dict[str, Any]]:
        """Copies of all states."""
        return [_state(metric) for metric in self._metrics]

    def load(self, states: list[dict[str, Any]]) -> None:
        """Put copies back; they stay usable."""
        for metric, state in zip(self._metrics, states, strict=True):
            for name, value in state.items():
                object.__setattr__(metric, name, _copy(value))

    def begin(self) -> None:
        """Start a step of several micro-batches."""
        for shadow in self._shadows.values():
            shadow.reset()
        self._handles = [
            metric.register_forward_hook(self._observe, with_kwargs=True)
            for metric in self._metrics
            if self._on_step is None or id(metric) in self._on_step
        ]

    def end(self) -> None:
        """End the step, or a failed attempt of it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def finish(self, logged_on_step: set[int]) -> None:
        """Set the step value of the metrics that are logged with `on_step=True` to that of the whole batch."""
        if logged_on_step or self._on_step is not None:
            self._on_step = logged_on_step | (self._on_step or set())
        for metric in self._metrics:
            if id(metric) in logged_on_step and id(metric) in self._shadows:
                metric._forward_cache = self._shadows[id(metric)].compute()

    def _observe(self, metric: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        shadow = self._shadows.get(id(metric))
        if shadow is None:
            assert isinstance(metric, Metric)
            shadow = self._shadows[id(metric)] = metric.clone()
            shadow._forward_hooks.clear()
            shadow._forward_hooks_with_kwargs.clear()
            shadow.reset()
        with torch.no_grad():
            shadow.update(*args, **kwargs)


def _state(metric: Metric) -> dict[str, Any]:
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    return {name: _copy(getattr(metric, name)) for name in names}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
