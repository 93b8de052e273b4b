"""The pages keep their word: every Python block runs, every configuration that they name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import CodeType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(
    r"^(?P<indent> *)```python\b.*?\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
CONFIG = re.compile(r"\bconfigs/[\w./-]+\.yaml\b")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def python_blocks(page: Path) -> Iterator[CodeType]:
    """Compile the page's Python blocks so that tracebacks show the page's own line numbers."""
    text = page.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        lines_above = "\n" * text.count("\n", 0, block.start("code"))
        yield compile(lines_above + dedent(block["code"]), page, "exec")


@pages
def test_the_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in python_blocks(page):
        exec(block, namespace)


@pages
def test_the_configurations_exist(page: Path) -> None:
    named = set(CONFIG.findall(page.read_text(encoding="utf-8")))
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
