"""Wrap a method of one object in layers that can be removed in any order."""

from collections.abc import Callable
from functools import partial
from typing import Any

Layer = Callable[..., Any]
"""Called as `layer(inner, *args, **kwargs)`, where `inner` is the method below."""


def wrap_method(owner: Any, name: str, layer: Layer, innermost: bool = False) -> Callable[[], None]:
    """Put a layer around `owner.name`, outside any earlier layers.

    With `innermost` it lies inside them, so that what it does comes first whatever the order of callbacks is.

    The replacement is a plain function without `__wrapped__`: Lightning skips hooks such as `configure_model` that it
    does not find overridden, and looks through `__wrapped__` to find out.

    Returns:
        A function that removes this layer. With the last layer gone, the object is as it was.
    """
    current = vars(owner).get(name)
    layers: list[Layer] | None = getattr(current, "_memfit_layers", None)
    if layers is None:
        layers = _install(owner, name)
    layers.insert(0 if innermost else len(layers), layer)

    def unwrap() -> None:
        if layer in layers:
            layers.remove(layer)
        installed = vars(owner).get(name)
        if not layers and getattr(installed, "_memfit_layers", None) is layers:
            installed._memfit_uninstall()

    return unwrap


def _install(owner: Any, name: str) -> list[Layer]:
    original = getattr(owner, name)
    had_attribute = name in vars(owner)
    layers: list[Layer] = []

    def layered(*args: Any, **kwargs: Any) -> Any:
        call = original
        for layer in layers:
            call = partial(layer, call)
        return call(*args, **kwargs)

    def uninstall() -> None:
        if had_attribute:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    layered._memfit_layers = layers  # type: ignore[attr-defined]
    layered._memfit_uninstall = uninstall  # type: ignore[attr-defined]
    setattr(owner, name, layered)
    return layers
