"""Which hooks of a user's module a traced or measured step calls: those of the step, and those that it needs.

A trace runs the real `Trainer.fit` on a clone, and a clone's hooks may write files, count, or talk to a service like
the module's own. So hooks around training are left out, except for those at its start that make what the step
uses. Reading their source tells: `changes_steps`. What it can't tell shows when the step fails without them, and the
caller tries again `with_start_hooks`.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_START = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start")

_END = (
    "on_train_epoch_end",
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


def with_or_without_start_hooks(module: Any, run: Callable[[bool], T]) -> T:
    """Run a step without the hooks that it doesn't seem to need, and again with them if that fails.

    Args:
        module: The module.
        run: Runs the step on a new clone, with all hooks at the start of training or only those it seems to need.
    """
    if not any(not changes_steps(module, name) for name in _START if _is_defined(module, name)):
        return run(True)
    try:
        return run(False)
    except Exception:
        return run(True)


def leave_out_hooks(clone: Any, with_start_hooks: bool) -> None:
    """Replace the hooks of a clone that a trial step doesn't need by nothing.

    Args:
        clone: A copy of a module, to be thrown away.
        with_start_hooks: Whether to keep every hook at the start of training.
    """
    left_out = [name for name in _END if hasattr(type(clone), name)]
    if not with_start_hooks:
        left_out += [name for name in _START if _is_defined(clone, name) and not changes_steps(clone, name)]
    if "setup" in left_out or not _is_defined(clone, "setup"):
        left_out.append("teardown")  # there is nothing to undo
    for name in left_out:
        object.__setattr__(clone, name, _do_nothing)


def changes_steps(module: Any, hook: str) -> bool:
    """Whether a hook may change what a step of its module does, as far as its source tells.

    It may if it uses the module's layers, parameters or methods of `torch.nn.Module`, sets an attribute that other
    methods read, hands the module to somebody else, sets one of torch's switches, or can't be read.
    """
    return _Reader(module).changes_steps(hook)


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
    if not isinstance(function, FunctionType):
        return None
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
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
