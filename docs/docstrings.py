"""A griffe extension: our docstrings, written as Lightning's are, for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

FORMULA = re.compile(r":math:`([^`]+)`")
DISPLAYED = re.compile(r"^\.\. math:: (.+?)$(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
ROLE = re.compile(r":(?:attr|class|func|meth|mod):`(?P<tilde>~?)(?P<name>[\w.]+)`")
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Turn roles into links and formulas, and show each ``Example:`` section as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is None:
            return

        def link(role: re.Match[str]) -> str:
            name = role["name"]
            shown = name.rpartition(".")[2] if role["tilde"] else name
            try:
                target = obj.resolve(name)
            except griffe.NameResolutionError:
                target = name
            return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'

        text = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
        text = DISPLAYED.sub(r"$$\n\1\n$$", text)
        obj.docstring.value = ROLE.sub(link, FORMULA.sub(r"$\1$", text))
