"""Classes as their source defines them, read without importing it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec, resolve_name
from itertools import chain
from pathlib import Path

PACKAGES = ("pflight", "torch", "lightning")
"""The packages whose source is read."""

_WITH_CLASSES_BY_NAME = (
    *("pflight", "pflight.callbacks", "pflight.datamodules", "pflight.models"),
    *("lightning.pytorch", "torch.optim"),
)
_WITHOUT_OPTIONS = ("abc.ABC", "typing.Generic", "typing.Protocol")
_DECORATORS = ("checked", "dataclass")  # which leave a constructor its arguments


@dataclass(frozen=True)
class Source:
    """A class in a module."""

    module: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.node.name

    @property
    def path(self) -> str:
        """The full name, with the module that defines the class."""
        return f"{self.module}.{self.name}"

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (ast.get_docstring(self.node) or "").partition("\n")[0]

    @property
    def options(self) -> list[str] | None:
        """Names of the arguments of the constructor, or ``None`` if the source leaves them open.

        If a constructor passes ``**kwargs`` on, the arguments of the base classes are among them.
        """
        if not {*map(_name, self.node.decorator_list)} <= {*_DECORATORS}:
            return None
        init = self._method("__init__")
        if init is None:
            own = self._fields
        else:
            own = _arguments(init)
            if not (init.args.vararg or init.args.kwarg):
                return own
        call = _passed_on(init) if init else ast.Call(ast.Name("super"), args=[], keywords=[])
        if call is None:
            return None
        placed = [one for one in call.args if not isinstance(one, ast.Starred)]
        given = {one.arg for one in call.keywords}
        options = dict.fromkeys(own)
        for base in map(self._path, self.node.bases):
            if base not in _WITHOUT_OPTIONS:
                source = find(base)
                inherited = None if source is None else source.options
                if inherited is None:
                    return None
                left = inherited[len(placed) :]
                options |= dict.fromkeys(name for name in left if name not in given)
        return [*options]

    @property
    def _fields(self) -> list[str]:
        """The fields of a dataclass."""
        if "dataclass" not in map(_name, self.node.decorator_list):
            return []
        nodes = [node for node in self.node.body if isinstance(node, ast.AnnAssign)]
        fields = [node.target for node in nodes if "ClassVar" not in ast.unparse(node.annotation)]
        return [field.id for field in fields if isinstance(field, ast.Name)]

    def _method(self, name: str) -> ast.FunctionDef | None:
        methods = (node for node in self.node.body if isinstance(node, ast.FunctionDef))
        return next((method for method in methods if method.name == name), None)

    def arguments(self, method: str) -> list[str]:
        """Return the names of the arguments of one of the class's own methods."""
        function = self._method(method)
        return [] if function is None else _arguments(function)

    def is_a(self, path: str) -> bool:
        """Return whether the class is, or derives from, the class of this path."""
        if self.path == path:
            return True
        bases = (find(self._path(base)) for base in self.node.bases)
        return any(base is not None and base.is_a(path) for base in bases)

    def _path(self, base: ast.expr) -> str:
        """Return the full name of a base class."""
        if isinstance(base, ast.Subscript):
            base = base.value
        first, _, rest = ast.unparse(base).partition(".")
        found = names(self.module).get(first)
        path = found if isinstance(found, str) else f"{self.module}.{first}"
        return f"{path}.{rest}" if rest else path


@functools.cache
def find(path: str) -> Source | None:
    """Return the class of a full name, also if its module only imports it.

    Returns:
        The class, or ``None`` if it is in none of :data:`PACKAGES`, or not easily found there.
    """
    module, _, name = path.rpartition(".")
    found = names(module).get(name)
    if isinstance(found, ast.ClassDef):
        return Source(module, found)
    return None if found in (None, path) else find(found)


@functools.cache
def names(module: str) -> dict[str, ast.ClassDef | str]:
    """Return what a module's names stand for: a class of its own, or the full name elsewhere."""
    file = _file(module)
    if file is None:
        return {}
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: dict[str, ast.ClassDef | str] = {}
    for node in _statements(ast.parse(file.read_bytes()).body):
        match node:
            case ast.ClassDef():
                found[node.name] = node
            case ast.ImportFrom():
                origin = "." * node.level + (node.module or "")
                origin = resolve_name(origin, package) if node.level else origin
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{origin}.{alias.name}"
            case ast.Import():
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=other)):
                found[name] = f"{module}.{other}"
    return found


@functools.cache
def exported(module: str) -> list[Source]:
    """Return the classes among the names that a package imports, without former names."""
    targets = (target for target in names(module).values() if isinstance(target, str))
    found = filter(None, map(find, targets))
    return [*dict.fromkeys(one for one in found if not one.name.startswith("_"))]


@functools.cache
def defined_names() -> set[str]:
    """Return the names of all classes that pflight, Lightning and torch's optimizers define."""
    packages = filter(None, map(_file, _WITH_CLASSES_BY_NAME))
    files = chain.from_iterable(package.parent.rglob("*.py") for package in packages)
    definitions = (re.findall(r"^ *class (\w+)", file.read_text("utf-8"), re.M) for file in files)
    return {*chain.from_iterable(definitions)}


@functools.cache
def _file(module: str) -> Path | None:
    """Return a module's file; ``pflight`` itself is all that is imported to find it."""
    parts = module.split(".")
    if parts[0] not in PACKAGES or not all(part.isidentifier() for part in parts):
        return None
    depth = 2 if parts[0] == "pflight" else 1  # each of pflight's folders may lie elsewhere
    try:
        spec = find_spec(".".join(parts[:depth]))
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest := parts[depth:]:
        path = path.parent.joinpath(*rest)
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path if path.suffix == ".py" and path.is_file() else None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, also those under a condition, as for types alone."""
    for node in body:
        yield from chain([node], _statements(node.body) if isinstance(node, ast.If) else [])


def _arguments(function: ast.FunctionDef) -> list[str]:
    """Return the names of a method's arguments, without ``self``, ``*args`` and ``**kwargs``."""
    named = function.args
    return [one.arg for one in (*named.posonlyargs, *named.args, *named.kwonlyargs)][1:]


def _passed_on(init: ast.FunctionDef) -> ast.Call | None:
    """Return the call of ``super().__init__`` if all further arguments serve it alone."""
    further = {one.arg for one in (init.args.vararg, init.args.kwarg) if one is not None}
    uses = [one.id for one in ast.walk(init) if isinstance(one, ast.Name) and one.id in further]
    for call in ast.walk(init):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
            stars = [one.value for one in call.args if isinstance(one, ast.Starred)]
            stars += [one.value for one in call.keywords if one.arg is None]
            if sorted(map(ast.unparse, stars)) == sorted(uses) == sorted(further):
                return call
    return None


def _name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
