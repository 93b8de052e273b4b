"""Write all that is made from the entries of methods, and the catalogue of all classes.

    python benchmarks/ship.py             # write it, after a class of a run was added or changed
    python benchmarks/ship.py --check     # name the files that it would change, with exit status 1

An entry is a ``Method`` in ``METHODS`` at the end of the method's module in ``callbacks/methods/``.
Modules are read, not imported. Methods are in the order of their sections in the documentation: a
section belongs to the methods that its heading names.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from catalogue import CATALOGUE, catalogue

ROOT = Path(__file__).resolve().parents[1]
MODULES, CLIENT_METHODS = ROOT / "callbacks" / "methods", ROOT / "models" / "client_methods"
FIRST_PAGES = ("algorithms.md", "fedec.md", "fesem.md", "pfedla.md")
MADE = (
    "<!-- `python benchmarks/ship.py` writes this section. Options of a block may be changed. -->"
)
LINE_LENGTH = 100


class Method(NamedTuple):
    """An entry, as its source has it, and its section's link."""

    module: str
    name: str
    callback: str
    used: str
    gives: str
    needs: str = ""
    manual: bool = False
    link: str = ""


def methods() -> list[Method]:
    """Return the entries in the order of their sections.

    Raises:
        SystemExit: If an entry can't be read, or no heading names a method or its class.
    """
    found = [one for path in sorted(MODULES.glob("*.py")) for one in _entries(path)]
    sections = {one: _section(one) for one in found}
    return [one._replace(link=sections[one][1]) for one in sorted(found, key=sections.__getitem__)]


def _entries(path: Path) -> Iterator[Method]:
    calls = [
        call
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "METHODS"
        for call in (node.value.elts if isinstance(node.value, ast.Tuple) else [node.value])
    ]
    for call in calls:
        try:
            name, kind, *texts = call.args
            named = {
                option.arg: ast.literal_eval(option.value)
                for option in call.keywords
                if option.arg not in ("tested", "tolerance")
            }
            values = [ast.literal_eval(one) for one in (name, *texts)]
            yield Method(path.stem, values[0], kind.id, *values[1:], **named)
        except (AttributeError, TypeError, ValueError) as error:
            where = f"{path.relative_to(ROOT)}, line {call.lineno}"
            sys.exit(f"{where}: this is no Method with literals: {error}")


def _section(method: Method) -> tuple[tuple[int, int], str]:
    """Return the place of the method's section, and its link from the folder of pages."""
    for name in (method.name, method.callback):
        word = re.compile(rf"(?<![\w+-]){re.escape(name)}(?![\w+-])", re.IGNORECASE)
        for number, page in enumerate(_pages()):
            text = (ROOT / "docs" / page).read_text("utf-8")
            for heading in re.finditer(r"^(##?) (.+)$", text, re.MULTILINE):
                if match := word.search(heading[2]):
                    place = number, heading.start() + match.start()
                    slug = re.sub(r"[^\w\s-]", "", heading[2]).strip().lower()
                    slug = re.sub(r"[-\s]+", "-", slug)
                    return place, page if heading[1] == "#" else f"{page}#{slug}"
    sys.exit(f"no heading of docs/methods/*.md names {method.name}: write its section first")


def _pages() -> list[str]:
    """Return the pages that have sections of methods, in the order of the site."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    return [*FIRST_PAGES, *re.findall(r"\bmethods/\w+\.md\b", nav)]


def files() -> dict[Path, str]:
    """Return what all files shall have in them."""
    shipped = methods()
    texts: dict[Path, str] = {}
    for folder, exported in (
        (ROOT / "callbacks", _callbacks(shipped)),
        (CLIENT_METHODS, _client_methods(CLIENT_METHODS)),
    ):
        prefix = "methods." if folder.name == "callbacks" else ""
        path = folder / "__init__.py"
        texts[path] = _exports(path.read_text("utf-8"), prefix, exported)
    readme, algorithms = ROOT / "README.md", ROOT / "docs" / "algorithms.md"
    names = ", ".join(one.name for one in shipped)
    texts[readme] = _row(readme.read_text("utf-8"), "algorithms", names)
    texts[algorithms] = _table(algorithms.read_text("utf-8"), shipped)
    for page, title, objects in (
        ("callbacks", "Algorithms", [f"pflight.callbacks.{one.callback}" for one in shipped]),
        ("models", "Client methods of the algorithms", _documented(shipped)),
    ):
        path = ROOT / "docs" / "api" / f"{page}.md"
        texts[path] = _blocks(path.read_text("utf-8"), title, [*dict.fromkeys(objects)])
    return {**texts, CATALOGUE: catalogue({one.name: one.needs for one in shipped})}


def _callbacks(shipped: list[Method]) -> dict[str, set[str]]:
    """Return what ``pflight.callbacks`` exports of each module of a method."""
    exported: dict[str, set[str]] = {}
    for path in sorted(MODULES.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        there = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        names = there & {one.callback for one in shipped if one.module == path.stem}
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= {*ast.literal_eval(node.value)}
        if names:
            exported[path.stem] = names
    return exported


def _client_methods(folder: Path) -> dict[str, set[str]]:
    """Return the public client methods that each module of a folder defines."""
    bases: dict[str, set[str]] = {}
    there: dict[str, list[str]] = {}
    for path in (*CLIENT_METHODS.glob("*.py"), *MODULES.glob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).partition("[")[0] for base in node.bases}
                if path.parent == folder and not node.name.startswith("_"):
                    there.setdefault(path.stem, []).append(node.name)

    def is_one(name: str) -> bool:
        return name == "ClientMethod" or any(map(is_one, bases.get(name, ())))

    found = {module: {*filter(is_one, names)} for module, names in there.items()}
    return {module: names for module, names in sorted(found.items()) if names}


def _documented(shipped: list[Method]) -> list[str]:
    """Return the paths of all client methods, those of shared modules first."""
    shared, own = _client_methods(CLIENT_METHODS), _client_methods(MODULES)
    paths = [
        f"pflight.models.client_methods.{one}" for names in shared.values() for one in sorted(names)
    ]
    return paths + [
        f"pflight.callbacks.methods.{module}.{name}"
        for module in dict.fromkeys(one.module for one in shipped)
        for name in sorted(own.get(module, ()))
    ]


def _by_type(name: str) -> tuple[int, str]:
    """Sort as ruff does: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _exports(text: str, prefix: str, exported: dict[str, set[str]]) -> str:
    """Return a package's source with these imports and with ``__all__`` of all that it has."""
    lines = []
    for module, names in sorted(exported.items()):
        line = f"from .{prefix}{module} import {', '.join(sorted(names, key=_by_type))}\n"
        if len(line) > LINE_LENGTH + 1:
            inside = "".join(f"    {name},\n" for name in sorted(names, key=_by_type))
            line = f"from .{prefix}{module} import (\n{inside})\n"
        lines.append(line)
    start = rf"^from \.{re.escape(prefix)}\w+ import "
    block = re.compile(rf"(?:{start}(?:\([^)]*\)|.*)\n)+", re.MULTILINE)
    text = _replaced(block, text, "".join(lines))
    tree, names = ast.parse(text), set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Assign):
            names |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    names -= {"__all__", "annotations"}
    inside = "".join(f'    "{name}",\n' for name in sorted(names, key=_by_type))
    return _replaced(
        re.compile(r"^__all__ = \[.*?^\]\n", re.M | re.S), text, f"__all__ = [\n{inside}]\n"
    )


def _row(text: str, head: str, cell: str) -> str:
    return _replaced(re.compile(rf"^\| {head} \| .*$", re.MULTILINE), text, f"| {head} | {cell} |")


def _table(text: str, shipped: list[Method]) -> str:
    """Return the page of algorithms with one row for each method, and with what they need."""
    rows = "".join(
        f"| [{one.name}]({one.link.removeprefix('algorithms.md')}) "
        f"| {one.used if '`' in one.used else f'`{one.used}`'} | {one.gives} |\n"
        for one in shipped
    )
    table = re.compile(
        r"(?<=^\| algorithm \| callback \| a client ends with \|\n\|---\|---\|---\|\n)(?:\|.*\n)+",
        re.M,
    )
    text = _replaced(table, text, rows)
    for needs in ("a head", "a head and classes", "adapters"):
        text = _row(text, needs, ", ".join(one.name for one in shipped if one.needs == needs))
    manual = ", ".join(one.name for one in shipped if one.manual)
    return _row(text, "automatic optimization", f"all but {manual}")


def _blocks(text: str, title: str, objects: list[str]) -> str:
    """Return a page of the API whose section has a block for each object; old blocks are kept."""
    section = re.compile(rf"(?<=^## {title}\n).*?(?=^## |\Z)", re.M | re.S)
    match = section.search(text)
    there = dict(re.findall(r"^::: (\S+)\n((?: .*\n)*)", match[0] if match else "", re.MULTILINE))
    options = "    options:\n      heading_level: 3\n      members: false\n"
    blocks = (f"::: {path}\n{there.get(path, options)}\n" for path in objects)
    return _replaced(section, text, f"\n{MADE}\n\n{''.join(blocks)}")


def _replaced(pattern: re.Pattern[str], text: str, new: str) -> str:
    """Replace the only match."""
    result, count = pattern.subn(lambda _: new, text)
    if count != 1:
        sys.exit(f"expected one part that matches {pattern.pattern!r}, found {count}")
    return result


def main() -> None:
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    stale = {path: text for path, text in files().items() if path.read_text("utf-8") != text}
    if sys.argv[1:] and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"run python benchmarks/ship.py, which writes {names}")
    for path, text in stale.items():
        path.write_text(text, "utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
