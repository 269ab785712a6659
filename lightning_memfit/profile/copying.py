"""`copied`: `copy.deepcopy` for modules that hold what can't be copied, such as locks, open files or generators.

A trial step runs on a copy, so that nothing of the user's changes. Locks are made anew. Queues have no bound in a copy,
in which no thread takes anything from them. What is written to a copied file goes nowhere, and one that is read is
opened once more. Anything else that can't be copied is replaced by an object that refuses to be used and says which
attribute it stands for: most steps don't use it.
"""

import copy
import copyreg
import csv
import functools
import io
import logging
import operator
import os
import queue
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from typing_extensions import override

from lightning_memfit.memory.wrapping import attributes_of
from lightning_memfit.profile.culprit import owner_of

T = TypeVar("T")

_MOST = 100
"""Objects of one module that can't be copied. Each costs another attempt."""


class UncopiedError(RuntimeError):
    """A step uses an object of its module that a copy of the module doesn't have."""


def copied(value: T, memo: dict[int, Any] | None = None) -> T:
    """Deep-copy a module or any other object, with substitutes for what can't be copied.

    Args:
        value: The object, which stays as it is.
        memo: As `copy.deepcopy` takes it.

    Raises:
        UncopiedError: If too many of its objects can't be copied.
        Exception: What copying the object itself, or one of its layers, raises.
    """
    known = dict(memo or {})
    kept: list[Any] = []  # as ids of objects are in `known`
    with _reduced():
        for _ in range(_MOST):
            attempt = dict(known)
            try:
                made = copy.deepcopy(value, attempt)
                _rebind(made, attempt)
                _copy_hooks(value, attempt)
                return made
            except Exception as error:
                stuck = _innermost_object(error)
                if stuck is None or stuck is value or isinstance(stuck, torch.nn.Module) or id(stuck) in known:
                    raise
                known[id(stuck)] = _substitute(stuck, _name_in(value, stuck))
                kept.append(stuck)
    names = ", ".join(sorted({_kind(one) for one in kept}))
    raise UncopiedError(f"more than {_MOST} objects of {type(value).__name__} can't be copied ({names})")


def _rebind(made: Any, memo: dict[int, Any]) -> None:
    """Let functions that a copy holds refer to the copies of what they enclose: `copy.deepcopy` copies no functions.

    Args:
        made: The copy.
        memo: Copies by the `id` of their originals, all of which are alive.
    """
    cells: dict[int, types.CellType] = {}
    for owner in made.modules() if isinstance(made, torch.nn.Module) else (made,):
        attributes = attributes_of(owner)
        if type(attributes) is not dict:
            continue
        for container in (attributes, *attributes.values()):
            if type(container) in (dict, OrderedDict):
                entries: Any = list(container.items())
            elif type(container) is list:
                entries = list(enumerate(container))
            else:
                continue
            for key, function in entries:
                if type(function) is types.FunctionType and function.__closure__:
                    rebound = _rebound(function, memo, cells)
                    if rebound is not function:
                        container[key] = rebound


def _rebound(function: Any, memo: dict[int, Any], cells: dict[int, types.CellType]) -> Any:
    """A function that encloses copies; the function itself if it encloses nothing that was copied."""
    enclosed = tuple(_rebound_cell(cell, memo, cells) for cell in function.__closure__)
    if all(map(operator.is_, enclosed, function.__closure__)):
        return function
    new = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, enclosed
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    return new


def _rebound_cell(cell: types.CellType, memo: dict[int, Any], cells: dict[int, types.CellType]) -> types.CellType:
    if id(cell) not in cells:
        cells[id(cell)] = cell  # a function that calls itself encloses itself
        try:
            inside = cell.cell_contents
        except ValueError:  # it is empty
            return cell
        new = memo.get(id(inside), inside)
        if isinstance(inside, weakref.ref) and id(inside()) in memo:
            new = weakref.ref(memo[id(inside())])
        elif type(inside) is types.FunctionType and inside.__closure__:
            new = _rebound(inside, memo, cells)
        if new is not inside:
            cells[id(cell)] = types.CellType(new)
    return cells[id(cell)]


def _copy_hooks(value: Any, memo: dict[int, Any]) -> None:
    """Give copied weights the user's hooks on their gradients, which `copy.deepcopy` leaves out.

    Args:
        value: What was copied.
        memo: Copies by the `id` of their originals.
    """
    cells: dict[int, types.CellType] = {}
    for weight in value.parameters() if isinstance(value, torch.nn.Module) else ():
        new = memo.get(id(weight))
        if new is None or new is weight or not new.requires_grad:
            continue
        for hook in _users_hooks(weight._backward_hooks):
            new.register_hook(_rebound_hook(hook, memo, cells))
        for hook in _users_hooks(weight._post_accumulate_grad_hooks):
            new.register_post_accumulate_grad_hook(_rebound_hook(hook, memo, cells))


def _users_hooks(hooks: Any) -> list[Any]:
    """Those that are the user's functions: a library's come with what registers them."""
    return [hook for hook in (hooks or {}).values() if _is_users(getattr(hook, "func", hook))]


def _is_users(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return isinstance(code, types.CodeType) and owner_of(code.co_filename) == "user"


def _rebound_hook(hook: Any, memo: dict[int, Any], cells: dict[int, types.CellType]) -> Any:
    """A hook that refers to copies."""
    if isinstance(hook, functools.partial):
        args = [memo.get(id(one), one) for one in hook.args]
        keywords = {name: memo.get(id(one), one) for name, one in hook.keywords.items()}
        return functools.partial(_rebound_hook(hook.func, memo, cells), *args, **keywords)
    if isinstance(hook, types.MethodType):
        return types.MethodType(hook.__func__, memo.get(id(hook.__self__), hook.__self__))
    return _rebound(hook, memo, cells) if hook.__closure__ else hook


def _innermost_object(error: BaseException) -> Any:
    """The object that `copy.deepcopy` failed at; None if it was not copying one."""
    found = None
    place = error.__traceback__
    while place is not None:
        if place.tb_frame.f_code is copy.deepcopy.__code__:
            found = place.tb_frame.f_locals.get("x")
        place = place.tb_next
    return found


def _substitute(value: Any, name: str) -> Any:
    """What a copy gets in place of an object that can't be copied."""
    if isinstance(value, (types.ModuleType, types.MappingProxyType, logging.Logger)):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # of a step that came before: its graph is no part of the copy
    if isinstance(value, io.IOBase) and not value.closed and value.writable() and not value.readable():
        return _Sink()
    if isinstance(value, io.IOBase) and (reopened := _reopened(value)) is not None:
        return reopened
    if isinstance(value, _CSV_WRITER):
        return csv.writer(_Sink())
    synchronize = sys.modules.get("multiprocessing.synchronize")
    if synchronize is not None and isinstance(value, (synchronize.Lock, synchronize.RLock)):
        return threading.RLock()
    return Untouchable(f"{name}a {_kind(value)}")


def _reopened(file: Any) -> Any:
    """The same file, opened once more to be read from the same place; None if that is not possible."""
    try:
        if file.closed or file.writable() or not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
            return None
        place = file.tell()
        if isinstance(file, io.TextIOBase):
            options = {"encoding": file.encoding, "errors": file.errors}
            made: Any = open(file.name, **options)  # type: ignore[attr-defined, call-overload]  # noqa: SIM115
        else:
            made = open(file.name, "rb")  # noqa: SIM115  (closed with the copy)
        made.seek(place)
        return made
    except (OSError, AttributeError, TypeError):  # it is a pipe, has been removed, or is being iterated over
        return None


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _name_in(owner: Any, value: Any) -> str:
    """`Model.layer.attribute, ` for an attribute of a module, of a plain object or of one in a tuple, else nothing."""
    for one in owner if isinstance(owner, tuple) else (owner,):
        for path, child in one.named_modules() if isinstance(one, torch.nn.Module) else [("", one)]:
            for name, attribute in getattr(child, "__dict__", {}).items():
                if attribute is value:
                    return f"`{'.'.join(part for part in (type(one).__name__, path, name) if part)}`, "
    return ""


class Untouchable:
    """Stands in a copy for an object that can't be copied; using it raises an `UncopiedError`.

    Args:
        what: The object in words.
    """

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_what", what)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UncopiedError(
            f"the step uses {object.__getattribute__(self, '_what')} that can't be copied, and a trial step leaves the "
            "module's own alone. Make it inside the step, or put it into a class whose `__deepcopy__` says what a copy "
            "gets"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # torch and Python ask every object for its protocols
        self._refuse()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Untouchable":
        return self

    @override
    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_what')}, not copied>"

    __call__ = __setattr__ = __iter__ = __next__ = __enter__ = __exit__ = _refuse
    __len__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = _refuse


class _Sink(io.TextIOBase):
    """A file that keeps nothing."""

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, text: Any, /) -> int:
        return len(text)


_CSV_WRITER: Any = type(csv.writer(io.StringIO()))


def _endless(items: list[Any]) -> "queue.Queue[Any]":
    """A queue that never makes who puts something into it wait, as nobody takes anything from a copy."""
    made: queue.Queue[Any] = queue.Queue()
    for item in items:
        made.put(item)
    return made


def _reduce_condition(condition: threading.Condition) -> Any:
    return threading.Condition, (vars(condition)["_lock"],)


_REDUCERS: dict[Any, Any] = {
    type(threading.Lock()): lambda lock: (threading.Lock, ()),
    type(threading.RLock()): lambda lock: (threading.RLock, ()),
    threading.Condition: _reduce_condition,
    threading.local: lambda local: (threading.local, ()),
    queue.Queue: lambda waiting: (_endless, (list(waiting.queue),)),
    queue.SimpleQueue: lambda waiting: (queue.SimpleQueue, ()),
    threading.Thread: lambda thread: (Untouchable, ("a threading.Thread",)),
    ThreadPoolExecutor: lambda pool: (Untouchable, ("a ThreadPoolExecutor",)),
}
"""How `copy.deepcopy` copies objects of these classes."""


@contextmanager
def _reduced() -> Iterator[None]:
    """Register `_REDUCERS`, where nothing is registered for their classes, for a while."""
    added = {kind: reduce for kind, reduce in _REDUCERS.items() if kind not in copyreg.dispatch_table}
    copyreg.dispatch_table.update(added)
    try:
        yield
    finally:
        for kind in added:
            del copyreg.dispatch_table[kind]
