"""`error_chain`: an error and those that led to it; they may be each other's context."""

import builtins
from collections.abc import Iterator
from typing import Any

_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, what it was raised from, and the members of exception groups, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting.append(one.__cause__)
        if not one.__suppress_context__:
            waiting.append(one.__context__)
        waiting.extend(one.exceptions if isinstance(one, _GROUP) else ())
