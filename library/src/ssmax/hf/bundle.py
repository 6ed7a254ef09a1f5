"""Parts of this package as one file that needs none of it: the very lines that run here.

From a few names on, every definition that they lead to is copied as it stands, in the order in
which Python would have run it. What is not reached is left out.
"""

import ast
import functools
import importlib.machinery
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = "ssmax"


class Symbol(NamedTuple):
    """Something of this package; without a name, a module itself."""

    module: str
    name: str


class _Use(NamedTuple):
    """Where a symbol is written in its file: `name`, or `module.name`."""

    line: int
    start: int
    stop: int
    symbol: Symbol


class _Statement:
    """A definition: its lines, with the comments above, and what it uses."""

    def __init__(self, home: "_Module", node: ast.stmt, after: ast.stmt | None) -> None:
        self.home, self._node = home, node
        decorators = getattr(node, "decorator_list", [])
        self.first = min(one.lineno for one in (node, *decorators))
        while home.lines[self.first - 2].startswith("#"):
            self.first -= 1
        # A string behind an assignment is its documentation.
        is_assigned = not isinstance(node, ast.FunctionDef | ast.ClassDef)
        has_words = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        last = after if is_assigned and has_words and after is not None else node
        self.last = last.end_lineno or last.lineno

    @property
    def imports(self) -> set[str]:
        """The lines that import what it uses of other packages."""
        used = {node.id for node in ast.walk(self._node) if isinstance(node, ast.Name)}
        return {self.home.outside[name] for name in used & set(self.home.outside)}

    @functools.cached_property
    def uses(self) -> set[_Use]:
        """What it uses of this package, itself included."""
        return set(self._uses(self._node))

    def _uses(self, statement: ast.stmt) -> Iterator[_Use]:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            start = self.home.lines[statement.lineno - 1].index(statement.name)
            own = Symbol(self.home.name, statement.name)
            yield _Use(statement.lineno, start, start + len(statement.name), own)
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
                raise ValueError(f"{self.home.name} imports {node.module} in a function")
            if isinstance(node, ast.Attribute):
                symbol = self.home.meant_by(node)
                if symbol is not None and symbol.name:
                    yield _Use(node.lineno, node.col_offset, node.end_col_offset or 0, symbol)
            if isinstance(node, ast.Name):
                symbol = self.home.inside.get(node.id)
                if symbol is not None and symbol.name:
                    yield _Use(node.lineno, node.col_offset, node.end_col_offset or 0, symbol)

    def spelled(self, names: Mapping[Symbol, str]) -> str:
        """Its own lines, every symbol by its name in the file."""
        lines = self.home.lines[self.first - 1 : self.last]
        for line, start, stop, symbol in sorted(self.uses, reverse=True):
            text = lines[line - self.first]
            lines[line - self.first] = text[:start] + names[symbol] + text[stop:]
        return "\n".join(lines)


class _Module:
    """A file's definitions, and what its imports mean."""

    def __init__(self, name: str) -> None:
        self.name = name
        spec = _spec(name)
        source = Path(spec.origin or "").read_text()
        self.lines = source.splitlines()
        self.inside: dict[str, Symbol] = {}
        self.outside: dict[str, str] = {}
        """Names from other packages, and the line that imports them."""
        body = ast.parse(source).body
        for node in body:
            # What a package loads on first use it imports for the type checker.
            parts = [node]
            if isinstance(node, ast.If) and spec.submodule_search_locations:
                parts = node.body if ast.unparse(node.test) == "TYPE_CHECKING" else parts
            for one in parts:
                self._bind(one)
        self.statements: dict[str, _Statement] = {}
        for node, after in zip(body, [*body[1:], None], strict=True):
            if names := _defined(node):
                self.statements |= dict.fromkeys(names, _Statement(self, node, after))

    def meant_by(self, node: ast.expr) -> Symbol | None:
        """What `name`, `module.name` or `package.module.name` is, where it is ours."""
        if isinstance(node, ast.Name):
            return self.inside.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self.meant_by(node.value)
        return None if owner is None or owner.name else _home(owner.module, node.attr)

    def _bind(self, node: ast.stmt) -> None:
        for name in _defined(node):
            self.inside[name] = Symbol(self.name, name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
                    self.inside[name] = _home(f"{node.module}", alias.name)
                else:
                    origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                    self.outside[name] = f"{origin}import {ast.unparse(alias)}"


_module = functools.cache(_Module)


def bundle(roots: Iterable[Symbol], instead: Mapping[Symbol, Symbol]) -> str:
    """Source of the roots and all that they need; `instead` puts one definition for another."""
    wanted: set[Symbol] = set()
    modules: dict[str, _Module] = {}
    begun: set[str] = set()
    for root in roots:
        _reach(root, instead, wanted)
        _in_order(root.module, modules, begun)
    statements = {
        Symbol(module, name): statement
        for module, home in modules.items()
        for name, statement in home.statements.items()
        if Symbol(module, name) in wanted
    }
    names: dict[Symbol, str] = {}
    for symbol in statements:
        is_taken = symbol.name in names.values()
        # A second one of the same name is told apart by where it comes from.
        behind = f"_of_{symbol.module.rpartition('.')[2]}" if is_taken else ""
        names[symbol] = symbol.name + behind
    names |= {old: names[new] for old, new in instead.items() if new in names}
    once = dict.fromkeys(statements.values())
    imports = sorted(set().union(*(one.imports for one in once)))
    definitions = [one.spelled(names) for one in once]
    return "\n\n\n".join(["\n".join(imports), *definitions]) + "\n"


def _reach(symbol: Symbol, instead: Mapping[Symbol, Symbol], wanted: set[Symbol]) -> None:
    """All that a symbol leads to."""
    symbol = instead.get(symbol, symbol)
    if symbol not in wanted:
        wanted.add(symbol)
        for use in _module(symbol.module).statements[symbol.name].uses:
            _reach(use.symbol, instead, wanted)


def _in_order(name: str, modules: dict[str, _Module], begun: set[str]) -> None:
    """A module behind those that it imports, as Python runs them."""
    if name not in begun:
        begun.add(name)
        for used in _module(name).inside.values():
            _in_order(used.module, modules, begun)
        modules[name] = _module(name)


def _home(module: str, name: str) -> Symbol:
    """Where a name is defined: a package hands on what its rooms define."""
    spec = _spec(module)
    if spec.submodule_search_locations and importlib.util.find_spec(f"{module}.{name}"):
        return Symbol(f"{module}.{name}", "")
    return _module(module).inside.get(name, Symbol(module, name))


def _spec(module: str) -> importlib.machinery.ModuleSpec:
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    return spec


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == PACKAGE


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    inner = (part for target in targets for part in ast.walk(target))
    return [part.id for part in inner if isinstance(part, ast.Name)]
