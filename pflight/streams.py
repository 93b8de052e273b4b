"""What standard streams can show: terminals without Unicode, and texts of somebody else."""

from __future__ import annotations

import codecs
import re
import sys
from io import TextIOWrapper
from typing import Any

_DIRECTIONS = r"\u200e\u200f\u202a-\u202e\u2066-\u2069"  # which turn the text that follows
_CONTROLS = re.compile(rf"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0e-\x1b\x7f-\x9f{_DIRECTIONS}]")
_PLAIN = {
    "±": "+/-",
    "\N{EN DASH}": "-",
    "…": "...",
    "\N{MULTIPLICATION SIGN}": "x",
    "“": '"',
    "”": '"',
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "─": "-",
}


def write_plainly() -> None:
    """Let standard streams write letters that their encoding lacks in ASCII."""
    codecs.register_error("pflight", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="pflight")


def one_line(text: str) -> str:
    r"""Return a text as one line without the control sequences of terminals.

    Example:
        >>> one_line("a \x1b[31mred\x1b[0m\nfile \u202e7")
        'a red file 7'
    """
    return " ".join(_CONTROLS.sub("", text).split())


def cell(value: Any) -> Any:
    """Return what a spreadsheet shows as it is: a text that begins like a formula is quoted.

    Example:
        >>> cell("=1+1"), cell(-0.5), cell("FedAvg")
        ("'=1+1", -0.5, 'FedAvg')
    """
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value


def markdown(text: str) -> str:
    r"""Return a text as Markdown shows it in a cell of a table.

    Example:
        >>> print(markdown("A | B <i>"))
        A \| B \<i>
    """
    return re.sub(r"([\\|*`<\[\]])", r"\\\1", " ".join(text.split()))


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, "?") for letter in lacking), error.end
