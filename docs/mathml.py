"""An MkDocs hook: formulas become MathML, which browsers show without scripts or fonts of ours."""

from __future__ import annotations

import logging
import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

LOG = logging.getLogger("mkdocs.hooks.mathml")

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


def on_page_content(html: str, **_: Any) -> str:
    """Replace what pymdownx.arithmatex marked as LaTeX, in pages and docstrings alike."""

    def mathml(formula: re.Match[str]) -> str:
        latex = unescape(formula["latex"])
        display = "inline" if formula["open"] == "(" else "block"
        known = re.sub(r"\\arg\b", r"\\text{arg}\\,", latex)
        result = convert(known, display=display)
        if "\\" in result:  # what latex2mathml does not know, it leaves as it is
            LOG.warning("this formula is not all MathML: %s", latex)
        return result

    return FORMULA.sub(mathml, html)
