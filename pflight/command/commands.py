"""The commands of ``pflight``, and the parser of all commands that are not runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pflight.messages import OF_THE_PARSER, closest, no_option, question

from .arguments import add_compare, add_deploy, add_export, add_prepare, add_report
from .list_command import add_list
from .version import __version__

RUNS = {
    "fit": "train clients, or continue to",
    "validate": "evaluate clients on validation samples",
    "test": "evaluate clients on test samples",
    "predict": "write each client's predictions",
}
"""The commands that run a federation. :mod:`pflight.command.cli` reads their options."""

OF_A_RUN = (
    *("seed_everything", "ckpt_path", "monitor", "mode"),
    *("trainer", "model", "data", "search_space", "weights_only"),
)
"""Options of a run without a dot in their names, if a configuration can hold them."""


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "compare": (add_compare, "train many methods at many seeds, and print one table"),
    "report": (add_report, "print the table of runs that exist, or of a comparison"),
    "export": (add_export, "write trained models as files for peft and other programs"),
    "prepare": (add_prepare, "turn data and partitions of others into files that pflight reads"),
    "deploy": (add_deploy, "run a federation whose clients are on other machines"),
    "list": (add_list, "show methods, data sets, partitions, networks and configurations"),
}
"""The other commands: what adds their arguments, and a summary.

The arguments name the function of the command. It is imported when the command runs.
"""


class CommandParser(argparse.ArgumentParser):
    """A parser that reports errors in one line, with a similar name.

    Args:
        *args: As for ``ArgumentParser``.
        takes_a_run: Whether to accept options of ``pflight fit``. They are stored unparsed in
            ``options.run_options``.
        **options: As for ``ArgumentParser``.
    """

    def __init__(self, *args: Any, takes_a_run: bool = False, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.takes_a_run = takes_a_run

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments. Unknown arguments are errors."""
        options, rest = super().parse_known_args(args, namespace)
        known = [option.lstrip("-") for option in self._option_string_actions]
        if self.takes_a_run:
            options.run_options = rest
            names = (option.partition("=")[0] for option in rest if option.startswith("--"))
            known += [*OF_A_RUN, *OF_THE_PARSER]
            rest = [one for one in names if "." not in one and one[2:] not in known][:1]
        if rest:
            name = rest[0].partition("=")[0].lstrip("-")
            if not rest[0].startswith("-"):
                self.error(f"unrecognized arguments: {' '.join(rest)}")
            if "set" in known and name.startswith(("trainer.", "data.", "model.")):
                self.error(f"there is no option {name}: give options of runs by --set {name}=...")
            self.error(no_option(name, known))
        return options, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [*map(str, action.choices)]
            meant = question(closest(str(value), known)) or f": choose {', '.join(known)}"
            raise argparse.ArgumentError(None, f"there is no {action.metavar} {value}{meant}")

    def error(self, message: str) -> NoReturn:
        """Print one line, and exit with status 2."""
        self.exit(2, f"pflight: error: {' '.join(message.split())}\n")


def parser() -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the main parser and the commands' parsers. For runs, these have no options."""
    front = CommandParser(
        "pflight",
        description="Personalised federated learning with PyTorch Lightning",
        epilog="`pflight fit --help` and so on describe the options of each.",
    )
    front.add_argument("--version", action="version", version=f"pflight {__version__}")
    group = front.add_subparsers(dest="command", metavar="command", title="commands")
    commands = {}
    for name, summary in RUNS.items():
        commands[name] = group.add_parser(name, help=summary, add_help=False)
    for name, (add_arguments, summary) in COMMANDS.items():
        commands[name] = group.add_parser(
            name, help=summary, description=f"{summary.capitalize()}."
        )
        add_arguments(commands[name])
    return front, commands
