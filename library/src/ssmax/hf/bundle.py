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
SCALE = "ops.scale."
"""How the rules, which are imported without torch, call what the file has without a module."""


class _Part(NamedTuple):
    """A definition or an import: its lines, with the comments above, and the names in it."""

    text: str
    names: frozenset[str]
    is_import: bool


def bundle(modules: Iterable[str], roots: Iterable[str], instead: Mapping[str, str]) -> str:
    """Copy the roots and all that they lead to, out of modules in the order of their imports.

    `instead` puts one definition for another. No name may be defined by two modules.
    """
    parts: dict[str, _Part] = {}
    ours: set[str] = set()
    for module in modules:
        source = inspect.getsource(importlib.import_module(module)).replace(SCALE, "")
        body = ast.parse(source).body
        for node, after in itertools.zip_longest(body, body[1:]):
            names = _defined(node)
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
                ours |= names
                continue
            part = _part(source.splitlines(), node, after)
            for name in names:
                known = parts.setdefault(name, part)
                if known is not part and not (known.is_import and part.is_import):
                    raise ValueError(f"{name} of {module} is another's name too; rename one")
    wanted: set[str] = set()
    _reach(roots, parts, instead, wanted)
    needed = sorted(
        {parts[name]: None for name in parts if name in wanted}, key=lambda part: not part.is_import
    )
    names = set().union(*(part.names for part in needed))
    if lost := sorted((names & ours) - set(parts) - set(instead)):
        raise ValueError(f"{', '.join(lost)} are of modules that are not bundled; add these")
    tail = [f"{old} = {new}" for old, new in instead.items() if new in wanted]
    return "\n\n\n".join([*(part.text for part in needed), *tail])


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
    is_value = isinstance(node, ast.Assign | ast.AnnAssign)
    last = after if is_value and isinstance(after, ast.Expr) else node
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    is_import = isinstance(node, ast.Import | ast.ImportFrom)
    return _Part("\n".join(lines[first - 1 : last.end_lineno]), frozenset(names), is_import)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    is_value = isinstance(node, ast.Assign | ast.AnnAssign)
    inner = (part for target in targets for part in ast.walk(target) if is_value)
    return {part.id for part in inner if isinstance(part, ast.Name)}
