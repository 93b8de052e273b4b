"""How large the code is: lines, files and what a round enters, beside what each may be at most.

    python benchmarks/size.py

Lines are those with code: neither blank, nor a comment, nor part of a docstring. The files of a
round are those of ``pflight/`` in which FedAvg's second round on scikit-learn's digits calls
functions, validation and logs included.
"""

from __future__ import annotations

import ast
import io
import logging
import sys
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import lightning as L

from pflight import Federation
from pflight.callbacks import FedAvg
from pflight.datamodules import Digits
from pflight.models import MLP, Classifier

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "pflight"
BUDGETS = {"command": 1_000, "runs": 1_000, "deploy": 2_200, "experiments": 2_500}
CORE_BUDGET, FILES_BUDGET, ROUND_BUDGET = 9_800, 20, 24
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """What a part of the code has, and what it may have at most."""

    what: str
    found: int
    most: int | None


def code_lines(source: str) -> int:
    """Return how many lines of a file have code.

    Example:
        >>> code_lines('"About it."' + chr(10) + "x = 1  # why" + chr(10))
        1
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    used = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(used - {*_docstrings(ast.parse(source))})


def _docstrings(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of texts that stand alone, as docstrings do."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def lines_in(folder: Path) -> int:
    """Return the lines of code in a folder and the folders in it."""
    return sum(code_lines(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))


def files_of_a_round() -> set[str]:
    """Return the files of ``pflight/`` that a round of FedAvg enters."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CORE):
            entered.add(str(path.relative_to(CORE)))

    class Second(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                sys.setprofile(note)

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            sys.setprofile(None)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing"), False)
    quiet |= dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[FedAvg(), Second()], **quiet)
    client = Classifier(MLP(64, [16], 10), num_classes=10)
    trainer.fit(Federation(client), datamodule=Digits(num_clients=5))
    return entered


def sizes() -> Iterator[Size]:
    """Yield what there is."""
    folders = sorted(path.parent for path in CORE.rglob("__init__.py"))
    rooms = {path.name: lines_in(path) for path in folders if path.parent == CORE}
    whole = lines_in(CORE)
    yield Size("lines of the core", whole - rooms["deploy"] - rooms["experiments"], CORE_BUDGET)
    for room, count in sorted(rooms.items()):
        yield Size(f"lines of {room}/", count, BUDGETS.get(room))
    for folder in folders:
        count = len(list(folder.glob("*.py")))
        yield Size(f"files in {folder.relative_to(ROOT)}/", count, FILES_BUDGET)
    yield Size("files that a FedAvg round enters", len(files_of_a_round()), ROUND_BUDGET)


def main() -> None:
    """Print the table."""
    print("| | found | at most |\n|---|---|---|")
    for size in sizes():
        over = size.most is not None and size.found > size.most
        most = "" if size.most is None else f"{size.most:,}{' (over)' * over}"
        print(f"| {size.what} | {size.found:,} | {most} |")


if __name__ == "__main__":
    main()
