"""Environment variables that code asks for, by its source."""

import ast
from collections import Counter
from functools import lru_cache

_MAPPINGS, _GETTERS = ("environ", "environb"), ("getenv", "getenvb")
"""What `os` has for environment variables."""


@lru_cache(4096)
def variables_in(source: str) -> frozenset[str] | None:
    """Names of the environment variables that a module's source asks for; None if it may ask for any.

    Names count that are written as texts, or as names that are given one text in the module. Variables that are only
    set are none.

    Args:
        source: Python code. None is returned for what isn't, if it has a word that asks for them.
    """
    # Most files don't have one. Python takes other letters in a name for those of ASCII that they look like.
    if source.isascii() and not any(word in source for word in (*_MAPPINGS, *_GETTERS)):
        return frozenset()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    nodes = list(ast.walk(tree))
    texts, known = _texts_by_name(nodes), set[str]()
    told: set[int] = set()
    for node in nodes:
        where, names = _asked(node)
        if where is None or _name_of(where) not in (*_MAPPINGS, *_GETTERS):
            continue
        told.add(id(where))
        for name in names:
            text = texts.get(name.id) if isinstance(name, ast.Name) else getattr(name, "value", None)
            if not isinstance(text, (str, bytes)):
                return None
            known.add(text if isinstance(text, str) else text.decode(errors="replace"))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and any(
            one.name in _MAPPINGS + _GETTERS and one.asname for one in node.names
        ):
            return None
        if (
            isinstance(node, (ast.Name, ast.Attribute))
            and _name_of(node) in _MAPPINGS + _GETTERS
            and id(node) not in told
        ):
            return None
    return frozenset(known)


def _asked(node: ast.AST) -> tuple[ast.expr | None, list[ast.expr]]:
    """What code looks names up in, which may be the environment, and the names; none where it only sets some."""
    if isinstance(node, ast.Subscript):
        return node.value, [node.slice] if isinstance(node.ctx, ast.Load) else []
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return node.comparators[0], [node.left]
    if isinstance(node, ast.Call) and node.args:
        function = node.func
        if _name_of(function) in _GETTERS:
            return function, node.args[:1]
        if isinstance(function, ast.Attribute) and function.attr in ("get", "pop", "setdefault"):
            return function.value, node.args[:1]
    return None, []


def _name_of(node: ast.AST) -> str:
    """The last name of `os.environ` or `environ`; empty for other code."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _texts_by_name(nodes: list[ast.AST]) -> dict[str, str]:
    """Names that are assigned once in a module, to a text."""
    stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    stored.update(node.arg for node in nodes if isinstance(node, ast.arg))
    found = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = getattr(node.targets[0], "id", "")
            if stored[name] == 1 and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                found[name] = node.value.value
    return found
