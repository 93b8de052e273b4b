"""Texts of messages: suggested names, and text that terminals can show."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from io import TextIOWrapper
from itertools import takewhile
from typing import Any

_DIRECTIONS = r"\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of the text
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
    """Let standard streams write letters in ASCII if their encoding lacks them."""
    codecs.register_error("pflight", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="pflight")


def listed(names: Iterable[str], wanted: str = "", most: int = 8) -> str:
    """Return names with commas between them; of many, only the nearest to what was wanted.

    Example:
        >>> listed(["a", "b"]), listed(["one", "two", "three"], "twos", most=2)
        ('a, b', 'two, one and 1 more')
    """
    every = [*names]
    if len(every) <= most:
        return ", ".join(every)
    nearest = get_close_matches(wanted, every, n=most // 2 + 1, cutoff=0)
    return f"{', '.join(nearest)} and {len(every) - len(nearest)} more"


def one_line(text: str) -> str:
    r"""Return a text as one line without the control sequences of terminals.

    Example:
        >>> one_line("a \x1b[31mred\x1b[0m\nfile \u202e7")
        'a red file 7'
    """
    return " ".join(_CONTROLS.sub("", text).split())


def cell(value: Any) -> Any:
    """Return a value that a spreadsheet shows unchanged. Quote a text that begins like a formula.

    Example:
        >>> cell("=1+1"), cell(-0.5), cell("FedAvg")
        ("'=1+1", -0.5, 'FedAvg')
    """
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value


def markdown(text: str) -> str:
    r"""Return a text escaped for a cell of a Markdown table.

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


OF_THE_PARSER = ("config", "print_config", "help")
"""Options of every run. They are in no configuration."""
OF_LOADERS = ("sampler", "batch_sampler", "drop_last")
"""Options of PyTorch's DataLoader without effect on clients' batches."""
OWN_BATCHES = "pflight makes the batches: each has batch_size samples, and the last one the rest"
_MISSED = 2  # letters that a misspelt name may lack, or have too many


def question(meant: Sequence[str]) -> str:
    """Return the end of a message: the suggested names.

    Example:
        >>> question(["fit"]), question([])
        (': did you mean fit?', '')
    """
    return f": did you mean {' or '.join(meant)}?" if meant else ""


def no_option(option: str, known: Iterable[str]) -> str:
    """Return a message that there is no such option.

    Args:
        option: The option's full name.
        known: The full names of the existing options.

    Example:
        >>> no_option("model.lr", ["model.local_epochs", "model.client.optimizer.lr"])
        'there is no option model.lr: did you mean model.client.optimizer.lr?'
    """
    if option.startswith("data.") and option.rpartition(".")[2] in OF_LOADERS:
        return f"there is no option {option}: {OWN_BATCHES}"
    return f"there is no option {option}{question(_meant(option, known))}"


def too_early(option: str) -> str:
    """Return a message that an option is given before its class.

    Example:
        >>> too_early("data.partition.alpha")
        'data.partition.alpha has to follow the class that has it: give --data.partition first'
    """
    whose = option.rpartition(".")[0]
    return f"{option} has to follow the class that has it: give --{whose} first"


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name that is most similar to ``name``; nothing if none is similar.

    A similar name contains ``name``, or is about as long.

    Example:
        >>> closest("Digit", ["Digits", "Dirichlet"]), closest("root", ["dropout"])
        (['Digits'], [])
    """
    alike = (one for one in known if name in one or abs(len(one) - len(name)) <= _MISSED)
    return get_close_matches(name, alike, n=1)


def _meant(option: str, known: Iterable[str]) -> list[str]:
    """Return the suggested options: the same name elsewhere, or a similar name."""
    *parents, name = option.split(".")
    places: dict[str, list[list[str]]] = {}
    for other in dict.fromkeys(known):
        *path, last = other.split(".")
        places.setdefault(last, []).append(path)
    siblings = [last for last, paths in places.items() if parents in paths]
    close = [name] if name in places else []
    close = close or closest(name, siblings)
    close = close or get_close_matches(name, places, n=1, cutoff=0.75)
    if not close:
        return []
    shared = {".".join([*path, close[0]]): _shared(path, parents) for path in places[close[0]]}
    return [other for other, count in shared.items() if count == max(shared.values())][:3]


def _shared(path: Sequence[str], other: Sequence[str]) -> int:
    """Count the leading parts that two paths share."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False))])


def nothing_sent(callback: object) -> str:
    """Return the message that all parameters that train are private."""
    return (
        f"{type(callback).__name__}: nothing is sent, since all parameters that are trained stay "
        "with the clients: take Local"
    )
