"""Which hooks of a user's module a traced or measured step calls: those of the step, and those that it needs.

A trace runs the real `Trainer.fit` on a clone, and a clone's hooks may write files, count, or talk to a service like
the module's own. So hooks around training are left out, except for those at its start that make what the step
uses, or tensors. Reading their source tells: `changes_steps`, `makes_tensors`. What it can't tell shows when the step
fails without them, and the caller tries again with all of them.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any, Literal, TypeVar

import torch

from lightning_memfit.profile.culprit import definition_of
from lightning_memfit.profile.reads import is_users_function, names_in
from lightning_memfit.profile.seal import RefusedError

T = TypeVar("T")

_START = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start")

_EPOCH_END = "on_train_epoch_end"

_END = (
    _EPOCH_END,
    "on_train_end",
    "on_fit_end",
    "prepare_data",  # the batch is given
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_model_zero_grad",
)

_UPSTREAM = ("lightning", "pytorch_lightning", "torch", "builtins")

_HARMLESS_CALLS = ("type", "super", "id", "isinstance", "print")


StartHooks = Literal["all", "acting", "needed"]
"""Which hooks at the start of training run: all, those that the step needs and those that make tensors, or only those
that it needs."""


def with_start_hooks(module: Any, run: Callable[[StartHooks], T]) -> T:
    """Run a step without hooks that don't seem to act; if that fails, with all; then without any that can be missed.

    Args:
        module: The module.
        run: Runs the step on a new clone, with some hooks at the start of training.
    """
    defined = [name for name in _START if _is_defined(module, name)]
    missed = [name for name in defined if not changes_steps(module, name)]
    if not missed:
        return run("all")
    making = [name for name in missed if makes_tensors(module, name)]
    attempts: list[StartHooks] = ["acting", *(("all",) if making != missed else ()), *(("needed",) if making else ())]
    for choice in attempts[:-1]:
        with suppress(Exception, RefusedError):
            return run(choice)
    return run(attempts[-1])


def leave_out_hooks(clone: Any, start_hooks: StartHooks) -> list[str]:
    """Replace the hooks of a clone that a trial step doesn't need by nothing.

    Args:
        clone: A copy of a module, to be thrown away.
        start_hooks: Which hooks at the start of training to keep.

    Returns:
        Names of those that were left out although they make tensors in training.
    """
    left_out, making = [name for name in _END if hasattr(type(clone), name)], []
    at_end = [name for name in (_EPOCH_END,) if _is_defined(clone, name) and makes_tensors(clone, name)]
    if start_hooks != "all":
        missed = [name for name in _START if _is_defined(clone, name) and not changes_steps(clone, name)]
        making = [name for name in missed if makes_tensors(clone, name)]
        left_out += [name for name in missed if start_hooks == "needed" or name not in making]
    if "setup" in left_out or not _is_defined(clone, "setup"):
        left_out.append("teardown")  # there is nothing to undo
    for name in left_out:
        object.__setattr__(clone, name, _do_nothing)
    return [*(making if start_hooks == "needed" else ()), *at_end]


def begins_epochs(clone: Any) -> bool:
    """Whether a hook of a clone's, which was not left out, runs at the start of every epoch."""
    return _is_defined(clone, "on_train_epoch_start") and "on_train_epoch_start" not in vars(clone)


def changes_steps(module: Any, hook: str) -> bool:
    """Whether a hook may change what a step of its module does, as far as its source tells.

    It may if it uses the module's layers, parameters or methods of `torch.nn.Module`, sets an attribute that other
    methods read, hands the module to somebody else, sets one of torch's switches, or can't be read.
    """
    return _Reader(module).changes_steps(hook)


def makes_tensors(module: Any, hook: str) -> bool:
    """Whether a hook, or what it calls of the user's, names anything of torch's but its loaders of data."""
    waiting = [one for one in _implementations(module, hook) if isinstance(one, FunctionType)]
    known: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in known:
            continue
        known.add(id(function))
        names = names_in(function.__code__)
        if any(name.partition(".")[0] == "torch" for name in names.imports):
            return True
        found = [function.__globals__.get(name) for name in names.globals]
        if any(map(_is_of_torch, found)):
            return True
        methods = (one for name in names.attributes for one in _implementations(module, name))
        users = (one for one in (*found, *methods) if isinstance(one, FunctionType) and is_users_function(one))
        waiting.extend(users)
    return False


def _is_of_torch(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and f"{name}.".startswith("torch.") and not name.startswith("torch.utils.data")


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a hook by nothing."""


def _implementations(module: Any, name: str) -> Iterator[Any]:
    """Functions and descriptors that the user's classes define under a name, the most derived first."""
    for kind in type(module).__mro__:
        if name in vars(kind) and not _is_upstream(kind):
            found = vars(kind)[name]
            if callable(found) or hasattr(type(found), "__get__"):  # else it is a plain value
                yield found


def _is_upstream(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _UPSTREAM


def _is_defined(module: Any, name: str) -> bool:
    return next(_implementations(module, name), None) is not None


class _Reader:
    """Reads the source of a module's hooks.

    Args:
        module: The module.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        self._tensors = {name for name, _ in (*module.named_children(), *tensors)}
        self._interface: set[str] = set(dir(torch.nn.Module)) - {"training"}
        self._hooks = {name for kind in type(module).__mro__ if _is_upstream(kind) for name in vars(kind)}
        self._read: set[str] = set()

    def changes_steps(self, name: str) -> bool:
        """Whether any of the definitions of a method may change what a step does."""
        self._read.add(name)
        return any(self._changes(function) for function in _implementations(self._module, name))

    def _changes(self, function: Any) -> bool:
        tree = _tree(function)
        if tree is None or not tree.args.args:
            return True
        own = tree.args.args[0].arg
        harmless = {
            id(argument)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _HARMLESS_CALLS
            for argument in call.args
        }
        owned = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | harmless
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == own and id(node) not in owned:
                return True  # handed to somebody else
            if not isinstance(node, (ast.Attribute, ast.Subscript)):
                continue
            is_set = not isinstance(node.ctx, ast.Load)
            attribute = node.value if isinstance(node, ast.Subscript) else node
            if isinstance(attribute, ast.Attribute) and self._matters(attribute, own, is_set):
                return True
        return False

    def _matters(self, node: ast.Attribute, own: str, is_set: bool) -> bool:
        base, name = _chain(node)
        if base == "torch":
            return is_set or node.attr.startswith(("set_", "use_", "enable_"))
        if base != own:
            return False
        if name in self._tensors or name in self._interface:
            return True
        if is_set:
            return name in self._names_in_steps
        return name not in self._read and self.changes_steps(name)  # a method of the user's own, perhaps

    @cached_property
    def _names_in_steps(self) -> set[str]:
        """Names in what a step runs: the hooks that it calls, and the module's methods that these call."""
        methods: dict[str, list[Any]] = {}
        for kind in type(self._module).__mro__:
            for name, function in vars(kind).items():
                if isinstance(function, FunctionType) and not _is_upstream(kind):
                    methods.setdefault(name, []).append(function)
        around = {*_START, *_END, "__init__", "teardown"}
        waiting = [name for name in methods if name not in around and name in self._hooks]
        names: set[str] = set()
        while waiting:
            for function in methods.pop(waiting.pop(), ()):
                found = set(_names(function.__code__))
                names |= found
                waiting.extend(found & methods.keys())
        return names


def _tree(function: Any) -> ast.FunctionDef | None:
    """The source of a plain function; None if it has a decorator or can't be found."""
    found = definition_of(function) if isinstance(function, FunctionType) else None
    if not isinstance(found, ast.FunctionDef):
        return None
    plain = all(isinstance(one, ast.Name) and one.id == "override" for one in found.decorator_list)
    return found if plain else None


def _chain(node: ast.Attribute) -> tuple[str | None, str]:
    """First two names of `a.b.c`: `a` and `b`; `a` is None where it is no name."""
    while isinstance(node.value, ast.Attribute):
        node = node.value
    return (node.value.id if isinstance(node.value, ast.Name) else None), node.attr


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            yield from _names(constant)
