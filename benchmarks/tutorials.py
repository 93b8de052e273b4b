"""Run the tutorials, and write their pages and notebooks.

    python benchmarks/tutorials.py                    # run all of them
    python benchmarks/tutorials.py start clusters     # run these
    python benchmarks/tutorials.py --check            # name stale files, with exit status 1

A tutorial is a Python file in ``docs/tutorials``, in the percent format of jupytext. Its page has
the code and what a run prints and draws. Its notebook has the same cells without their outputs. The
check runs nothing: it compares all but the outputs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import matplotlib
import nbformat

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "tutorials"
MADE = "<!-- `python benchmarks/tutorials.py` writes this page from the Python file beside it. -->"
INSTALL = re.compile(r"^%pip install (.+)$", re.MULTILINE)
OUTPUT = re.compile(r"\n```text\n.*?\n```\n|\n!\[[^\]]*\]\(images/[^)]*\)\n", re.DOTALL)


def tutorials() -> dict[str, Path]:
    """Return the files of all tutorials by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.py"))}


def notebook(path: Path) -> Any:
    """Return a tutorial as a notebook without outputs, always with the same ids of cells."""
    found = jupytext.read(path, fmt="py:percent")
    found.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python"}}
    found.metadata["kernelspec"]["name"] = "python3"
    for place, cell in enumerate(found.cells):
        cell.id, cell.metadata = f"cell-{place}", {}
    return found


def page(name: str, outputs: dict[int, str]) -> str:
    """Return a tutorial's page.

    Args:
        name: The tutorial.
        outputs: What stands below a cell, by the cell's place.
    """
    title, *cells = notebook(FOLDER / f"{name}.py").cells
    (install,) = (found[1] for cell in cells if (found := INSTALL.search(cell.source)))
    heading, _, text = title.source.partition("\n\n")
    files = f"[notebook]({name}.ipynb) and [Python file]({name}.py)"
    parts = [MADE, heading, text, f"*This page as a {files}; it needs `pip install {install}`.*"]
    for place, cell in enumerate(cells, 1):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif not INSTALL.search(cell.source):
            parts.append(f"```python\n{cell.source}\n```")
        if place in outputs:
            parts.append(outputs[place])
    return "\n\n".join(parts) + "\n"


def outputs_of(name: str) -> dict[int, str]:
    """Run a tutorial in an empty folder, and return what its cells print and draw, by place.

    Pictures are written beside the page.
    """
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    matplotlib.use("Agg")
    found: dict[int, str] = {}
    namespace = {"__name__": "__main__"}
    images = FOLDER / "images"
    images.mkdir(exist_ok=True)
    for old in images.glob(f"{name}-*.png"):
        old.unlink()
    cells = notebook(FOLDER / f"{name}.py").cells
    with _in_empty_folder():
        for place, cell in enumerate(cells):
            if cell.cell_type != "code" or cell.source.startswith("%"):
                continue
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                value = _run(cell.source, f"{name}, cell {place}", namespace)
            figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
            if isinstance(value, Figure) and value not in figures:
                figures.append(value)
            parts = []
            if text := printed.getvalue().strip("\n"):
                parts.append(f"```text\n{text}\n```")
            for figure in figures:
                count = len([*images.glob(f"{name}-*.png")]) + 1
                file = images / f"{name}-{count}.png"
                figure.savefig(file, dpi=110, bbox_inches="tight", metadata={"Software": None})
                parts.append(f"![{_alt(figure)}](images/{file.name})")
            pyplot.close("all")
            if parts:
                found[place] = "\n\n".join(parts)
    return found


def _run(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """Run a cell, and return the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace)


def _alt(figure: Any) -> str:
    labels = [name for axes in figure.axes for name in (axes.get_title(), axes.get_ylabel())]
    return "; ".join(dict.fromkeys(filter(None, labels))).replace("\n", " ") or "a picture"


@contextlib.contextmanager
def _in_empty_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


def stale(name: str) -> list[Path]:
    """Return a tutorial's page and notebook, if they have other code than its file."""
    path, found = FOLDER / f"{name}.md", FOLDER / f"{name}.ipynb"
    text = path.read_text("utf-8") if path.exists() else ""
    kept = found.read_text("utf-8") if found.exists() else ""
    now = nbformat.writes(notebook(FOLDER / f"{name}.py"))
    changed = {path: OUTPUT.sub("", text) != page(name, {}), found: kept != now}
    return [file for file, differs in changed.items() if differs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    names = given.names or [*tutorials()]
    if unknown := {*names} - {*tutorials()}:
        parser.error(f"there is no tutorial {unknown.pop()!r}; there are {', '.join(tutorials())}")
    if given.check:
        changed = [str(path.relative_to(ROOT)) for name in names for path in stale(name)]
        if changed:
            sys.exit(f"run python benchmarks/tutorials.py, which writes {', '.join(changed)}")
        return
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    for name in names:
        text = page(name, outputs_of(name))
        (FOLDER / f"{name}.md").write_text(text, "utf-8")
        text = nbformat.writes(notebook(FOLDER / f"{name}.py"))
        (FOLDER / f"{name}.ipynb").write_text(text, "utf-8")
        print(f"docs/tutorials/{name}.md", flush=True)


if __name__ == "__main__":
    main()
