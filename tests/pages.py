"""What is in the pages of the documentation: their blocks of code, and the files these make up."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType

ROOT = Path(__file__).parents[1]
DIGITS = str(ROOT / "tests" / "digits.yaml")
"""A configuration of a whole run, FeSEM on digits with two classes each."""
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)\b(?P<options>.*?)\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
TITLE = re.compile(r'title="([^"]+)"')


def blocks(page: Path, language: str) -> Iterator[tuple[str, int]]:
    """Yield the page's blocks of a language, and how many lines are above each."""
    text = page.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        if block["language"] == language:
            yield dedent(block["code"]), text.count("\n", 0, block.start("code"))


def files(page: Path) -> dict[str, str]:
    """Return what the page shows as files of the reader's, by name: blocks with a title."""
    found = {}
    for block in FENCE.finditer(page.read_text(encoding="utf-8")):
        if title := TITLE.search(block["options"]):
            found[title[1]] = dedent(block["code"])
    return found


def modules(page: Path) -> dict[str, ModuleType]:
    """Return the Python files as modules by name, known so that their objects can be pickled."""
    found = {}
    for name, code in files(page).items():
        if name.endswith(".py"):
            module = found[name[:-3]] = sys.modules[name[:-3]] = ModuleType(name[:-3])
            exec(compile(code, f"{page.name}: {name}", "exec"), vars(module))
    return found
