"""`ReplacedForward`: a reversible replacement of the `forward` of one block."""

from abc import abstractmethod
from typing import Any

from torch import nn


class ReplacedForward:
    """Replaces the `forward` of one block, which subclasses run in their own way.

    It is an object and not a closure, so that a deep copy of the block calls the copy.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.shadowed = vars(block).get("forward")
        self.__wrapped__ = self.shadowed or type(block).forward  # for inspect.signature

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward.

        Raises:
            ValueError: If it computes derivatives by itself in a way that torch allows under no checkpointing.
        """
        try:
            if self.shadowed is not None:
                return self.shadowed(*args, **kwargs)
            return type(self.block).forward(self.block, *args, **kwargs)
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise ValueError(
                f"{type(self.block).__name__} can't be checkpointed or offloaded: {error} Name the others in `blocks`, "
                "or give it 'none' in `choices`."
            ) from error
