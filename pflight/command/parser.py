"""The parser of the command line, with errors in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from pflight.errors import ConfigurationError
from pflight.options import annotation, intervals

from .by_class import split
from .defaults import drop_untold_defaults, spec, without_defaults
from .mistakes import mistake


class FederationParser(LightningArgumentParser):
    """A parser that reports errors in one line, with a similar option.

    It accepts ``None`` as ``null``. jsonargparse reads ``--model.client.constraint null`` and
    passes the text ``None`` to the parser of the client's options.

    If a class has a ``seed`` with default 0, the default is ``None`` here: the seed of the run.
    """

    def add_class_arguments(self, theclass: type, *more: Any, **options: Any) -> list[str]:
        """Add the arguments of a class as usual, with their annotated ranges in the help."""
        added: list[str] = super().add_class_arguments(theclass, *more, **options)
        for action in self._actions:
            if action.dest in added:
                found = intervals(annotation(theclass, action.dest.rpartition(".")[2]))
                action.help = " ".join([action.help or "", *(f"In {one}." for one in found)])
        if "seed" in added and self.get_default("seed") == 0:
            self.set_defaults(seed=None)
        return added

    def get_defaults(self, skip_validation: bool = False, **options: Any) -> Namespace:
        """Return the defaults.

        jsonargparse skips the validation before it parses arguments. Then it gets the name of a
        default class without the defaults of its options, since another class would inherit them.
        It adds the defaults of the finally chosen class itself.
        """
        defaults = super().get_defaults(skip_validation=skip_validation, **options)
        if skip_validation:
            for name, value in vars(defaults).items():
                if isinstance(value, Namespace) and "class_path" in value:
                    defaults[name] = spec(self.get_default(name))
        return defaults

    def dump(self, cfg: Namespace, *more: Any, **options: Any) -> str:
        """Return the configuration as text, without defaults that have no text form."""
        cfg = cfg.clone()
        drop_untold_defaults(cfg)
        return str(super().dump(cfg, *more, **options))

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *more: Any, **options: Any
    ) -> Namespace:
        """Parse arguments as usual."""
        if args is not None:
            args = [re.sub("=None$", "=null", arg) for arg in args]
        return super().parse_args(args, *more, **options)

    def parse_run(self, args: Sequence[str], commands: Mapping[str, FederationParser]) -> Namespace:
        """Parse the arguments of a run.

        Options of a callback by its class are set last, independent of their place on the line.

        Args:
            args: The arguments ``--option=value``.
            commands: The parser of each command.

        Raises:
            UnknownOptionError: There is no option of that name.
            ConfigurationError: An argument is wrong.
        """
        args, by_class = split(args)
        shown = [arg for arg in args if by_class and arg.startswith("--print_config")]
        rest = [arg for arg in args if arg not in shown]
        command = next((arg for arg in args if arg in commands), None)
        try:
            config = self.parse_args(without_defaults(rest))
        except ArgumentError as error:
            if command is None:
                raise ConfigurationError(str(error)) from error
            raise mistake(error, rest, commands[command]) from error
        if by_class:
            parser = commands[config.subcommand]

            def parse(args: list[str], config: Namespace) -> Namespace:
                try:
                    return parser.parse_args(args, namespace=config, defaults=False)
                except ArgumentError as error:
                    raise mistake(error, args, parser, config) from error

            for option in by_class:
                option.put(config[config.subcommand], parse)
            if shown:
                self.parse_args([config.subcommand, *shown], namespace=config)
        return config
