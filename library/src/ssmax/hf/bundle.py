"""Parts of this package as one file that needs none of it: the very lines that run here.

Not a file kept by hand, which would say all of it twice: of 1,700 lines that are copied, n takes
430 and the rules 310; the rest is how a model is converted and what is checked while it is loaded.
"""

import ast
import importlib
import inspect
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

PACKAGE = "ssmax"
SCALE = "ops.scale"
"""What the rules, which are imported without torch, call by their module's name."""


class _Part(NamedTuple):
    """A definition: its lines, with the comments above, and the names in it."""

    text: str
    names: frozenset[str]


def bundle(modules: Iterable[str], roots: Iterable[str], instead: Mapping[str, str]) -> str:
    """Copy the roots and all that they lead to, out of modules in the order of their imports.

    `instead` puts one definition for another. No name may be defined by two modules.
    """
    parts: dict[str, _Part] = {}
    imports: dict[str, str] = {}
    ours: set[str] = set()
    for module in modules:
        source = inspect.getsource(importlib.import_module(module))
        body = ast.parse(source).body
        for node, after in itertools.zip_longest(body, body[1:]):
            part = _part(source.splitlines(), node, after)
            for name in _defined(node):
                if name in parts:
                    raise ValueError(f"{name} of {module} is another's name too; rename one")
                parts[name] = part
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports |= _imports(node)
            if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith(f"{PACKAGE}."):
                ours |= {alias.asname or alias.name for alias in node.names}
    wanted: set[str] = set()
    _reach(roots, parts, instead, wanted)
    needed = {parts[name]: None for name in parts if name in wanted}
    names = set().union(*(part.names for part in needed))
    if lost := sorted((names & ours) - set(parts) - set(instead)):
        raise ValueError(f"{', '.join(lost)} are of modules that are not bundled; add these")
    head = "\n".join(sorted({imports[name] for name in names & set(imports)}))
    tail = [f"{old} = {new}" for old, new in instead.items() if new in wanted]
    return "\n\n\n".join([head, *(part.text for part in needed), *tail])


def _reach(
    names: Iterable[str], parts: Mapping[str, _Part], instead: Mapping[str, str], wanted: set[str]
) -> None:
    """Add all that these names lead to."""
    for name in names:
        name = instead.get(name, name)
        if name in parts and name not in wanted:
            wanted.add(name)
            _reach(parts[name].names, parts, instead, wanted)


def _part(lines: list[str], node: ast.stmt, after: ast.stmt | None) -> _Part:
    """Cut a statement out, with the comments above it and the string below an assignment."""
    first = min(one.lineno for one in (node, *getattr(node, "decorator_list", [])))
    while lines[first - 2].startswith("#"):
        first -= 1
    is_described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    is_value = isinstance(node, ast.Assign | ast.AnnAssign)
    last = after if is_value and is_described and after is not None else node
    text = "\n".join(lines[first - 1 : last.end_lineno]).replace(f"{SCALE}.", "")
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    names |= {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == SCALE
    }
    return _Part(text, frozenset(names))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    inner = (part for target in targets for part in ast.walk(target))
    return [part.id for part in inner if isinstance(part, ast.Name)]


def _imports(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Find the names that a line imports from other packages, and the line for each."""
    origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
    if origin.startswith((f"from {PACKAGE} ", f"from {PACKAGE}.")):
        return {}
    return {
        alias.asname or alias.name.partition(".")[0]: f"{origin}import {ast.unparse(alias)}"
        for alias in node.names
    }
