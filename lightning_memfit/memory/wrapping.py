"""Wrap a method of one object in layers that can be removed in any order."""

from collections.abc import Callable
from functools import partial
from typing import Any

from typing_extensions import override

Layer = Callable[..., Any]
"""Called as `layer(inner, *args, **kwargs)`, where `inner` is the method below."""


def wrap_method(owner: Any, name: str, layer: Layer, innermost: bool = False) -> Callable[[], None]:
    """Put a layer around `owner.name`, outside any earlier layers.

    With `innermost` it lies inside them, so that what it does comes first whatever the order of callbacks is. A copy of
    the owner, by `deepcopy` or pickle, has the method without layers.

    Returns:
        A function that removes this layer. With the last layer gone, the object is as it was.
    """
    layered = own_attribute(owner, name)
    if not isinstance(layered, Layered):
        layered = Layered(owner, name)
        setattr(owner, name, layered)
    layers = layered.layers
    layers.insert(0 if innermost else len(layers), layer)

    def unwrap() -> None:
        if layer in layers:
            layers.remove(layer)
        if not layers and own_attribute(owner, name) is layered:
            layered.uninstall()

    return unwrap


def own_attribute(owner: Any, name: str) -> Any:
    """Return an attribute that an object holds itself; None if it has it from its class, or not at all.

    `vars(owner)` would tell as well, but CPython then makes the object's dictionary, once and for good, and every later
    access to the object's attributes is slower: with a strategy and a loop, by 10 microseconds in a training step.
    """
    value, inherited = getattr(owner, name, None), getattr(type(owner), name, None)
    is_inherited = value is inherited or getattr(value, "__func__", value) is inherited
    return None if is_inherited else value


def code_below(owner: Any, name: str) -> Any:
    """Return the code of a method without the layers that `wrap_method` has put around it; None if it has none."""
    found = own_attribute(owner, name)
    return getattr(found.original if isinstance(found, Layered) else getattr(owner, name), "__code__", None)


class Layered:
    """What stands in a method's place.

    It has no `__wrapped__`, and a code of its own: Lightning skips hooks such as `configure_model` that it does not
    find overridden, and compares code to find out.

    Args:
        owner: The object.
        name: Name of its method.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.layers: list[Layer] = []
        self._owner = owner
        self._name = name
        self._own = own_attribute(owner, name)
        self.original = getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method in all its layers."""
        layers = self.layers
        if len(layers) == 1:  # the usual case, in every step
            return layers[0](self.original, *args, **kwargs)
        call = self.original
        for layer in layers:
            call = partial(layer, call)
        return call(*args, **kwargs)

    __code__ = __call__.__code__

    @override
    def __reduce__(self) -> Any:
        """Be the method alone in a copy of the owner, which has no attributes yet when this is made."""
        return (getattr, (self._owner, self._name)) if self._own is None else (_itself, (self._own,))

    def uninstall(self) -> None:
        """Give the object its method back."""
        if self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


def _itself(value: Any) -> Any:
    return value
