"""The command line ``pflight fit|validate|test|predict``, built on LightningCLI."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import lightning as L
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer

from pflight.callbacks.monitors.client_table import ClientTable
from pflight.callbacks.monitors.hparams import hparams_of_config
from pflight.callbacks.monitors.progress import FederationProgressBar
from pflight.callbacks.monitors.report import PredictionWriter, ResultTable
from pflight.callbacks.monitors.tensorboard import TensorBoardReport
from pflight.errors import ClientError, ConfigurationError
from pflight.federation import Federation
from pflight.history import check_trained
from pflight.options import as_list, why_not_built
from pflight.runs.callbacks import RunCheckpoint, SaveRunConfig, dumped
from pflight.runs.checkpoint import read_checkpoint
from pflight.runs.checks import check_processes, check_strategy
from pflight.runs.files import full_disk, full_disk_left_to_the_main_thread
from pflight.runs.folder import RunFolder
from pflight.runs.signals import SaveWhenStopped, StopBetweenRounds
from pflight.task import Task

# These imports also import their packages. Then their classes have short names.
from .built import built, refusal
from .by_class import joined
from .config_files import MODE, with_shipped_configs
from .defaults import drop_untold_defaults, specs
from .parser import FederationParser
from .process import configuration_error, fail, quieten, say
from .version import __version__

__all__ = ["FederationCLI", "main"]

_EPILOG = (
    "Options of the federation: --model.help Federation; of its parts, for example: "
    "--data.help Digits, --model.client.help ProximalClient, --trainer.callbacks.help FeSEM. "
    "--print_config shows what a run would use."
)
_TRAINER_DEFAULTS = {
    "default_root_dir": "runs/default",
    "max_epochs": 100,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
}
_TEST = ".test"
_FEDERATION = {
    "class_path": "pflight.Federation",
    "init_args": {"client": {"class_path": "pflight.models.Classifier"}},
}


class FederationCLI(LightningCLI):
    """LightningCLI for federations, with one run in one folder.

    The default model is a :class:`~pflight.Federation` with a
    :class:`~pflight.models.Classifier` as its client. The run folder is
    ``trainer.default_root_dir``. If the configuration has no logger or ``ModelCheckpoint``, a
    ``fit`` writes there

    - ``config.yaml`` and TensorBoard's events,
    - ``checkpoints/last.ckpt`` after every round, and
    - ``checkpoints/best.ckpt``, chosen by ``--monitor`` and ``--mode``; ready-made tasks have
      defaults for both.

    ``--ckpt_path last`` and ``best`` mean these files. All commands but ``fit`` use ``best`` by
    default. Only one ``fit`` at a time can write to a folder.

    Args:
        args: Arguments in place of those of the process.
        stop: Ends a run when a signal arrives; by default Lightning handles signals.
    """

    def __init__(
        self, args: list[str] | None = None, stop: StopBetweenRounds | None = None
    ) -> None:
        self._stop = stop
        self._resumed_step: int | None = None
        self._in_place = False  # whether the run folder holds this run's files
        self._until_done = ExitStack()
        settings = {"exit_on_error": False, "allow_abbrev": False, "parser_mode": MODE}
        commands = {name: {**settings, "epilog": _EPILOG} for name in self.subcommands()}
        try:
            with self._until_done:
                super().__init__(
                    L.LightningModule,
                    L.LightningDataModule,
                    save_config_callback=SaveRunConfig,
                    save_config_kwargs={"make_room": self._make_room},
                    trainer_defaults=_TRAINER_DEFAULTS,
                    seed_everything_default=0,
                    parser_kwargs={
                        **settings,
                        "prog": "pflight",
                        "description": "Personalized federated learning with PyTorch Lightning",
                        "version": __version__,
                        **commands,
                    },
                    subclass_mode_model=True,
                    subclass_mode_data=True,
                    auto_configure_optimizers=False,
                    load_from_checkpoint_support=False,
                    parser_class=FederationParser,
                    args=args,
                )
        except ConfigurationError as error:
            whose, refused, _ = str(error).partition("optimizer can't be built: ")
            if refused and (found := self._refused_optimizer()):
                option, reason = found
                raise ConfigurationError(f"{option}: {whose}{refused}{reason}") from error
            raise
        except Exception as error:
            if full_disk(error) and hasattr(self, "config") and self.config.subcommand != "fit":
                error.add_note(f"during {self.config.subcommand} in {self.folder.path}")
            raise

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Make the federation the default model, and add ``--monitor`` and ``--mode``."""
        parser.set_defaults({"model": _FEDERATION})
        parser.add_argument(
            "--monitor", type=str | None, help="Metric that chooses best.ckpt: val/macro_mae, say."
        )
        parser.add_argument(
            "--mode",
            type=Literal["min", "max"] | None,
            help="Whether the lowest or the highest --monitor is best.",
        )
        parser.add_argument(
            "--search_space",
            type=dict[str, Any] | None,
            help="Options that `pflight compare --tune` chooses, each with a range or values.",
        )

    def parse_arguments(self, parser: Any, args: ArgsType) -> None:
        """Parse the arguments. A missing config file is searched among the shipped ones."""
        given = args if isinstance(args, list) else sys.argv[1:]
        commands = {name: self._parser(name) for name in self.subcommands()}
        try:
            self.config = parser.parse_run(with_shipped_configs(joined(given)), commands)
        except UnicodeDecodeError as error:  # in the file of an option, such as --trainer
            raise ConfigurationError(f"a file among the options is not text: {error}") from error
        except RecursionError as error:
            raise ConfigurationError("the options are nested too deeply") from error
        drop_untold_defaults(self.config)
        self._check_options(self.config[self.config.subcommand])

    def _check_options(self, config: Namespace) -> None:
        """Raise if Lightning would fail with a traceback for these options."""
        if not isinstance(config.trainer, Namespace):
            raise ConfigurationError(f"trainer: expected a mapping, got {config.trainer}")
        if not 0 <= int(config.seed_everything or 0) < 2**32:
            raise ConfigurationError(
                f"seed_everything must be from 0 to 2**32 - 1, got {config.seed_everything}"
            )
        if (config.monitor is None) != (config.mode is None):
            raise ConfigurationError(
                "give --monitor and --mode together, such as --monitor val/macro_mae --mode min; "
                f"got monitor={config.monitor} and mode={config.mode}"
            )

    def _parse_ckpt_path(self) -> None:
        """Take no options from the checkpoint, since the configuration has them."""

    @cached_property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self._get(self.config, "trainer").default_root_dir)

    def before_instantiate_classes(self) -> None:
        """Pass ``seed_everything`` to objects without a seed, and find the checkpoint."""
        self._pass_seed()
        config = self.config[self.subcommand]
        if not config.trainer.fast_dev_run:
            self.folder.check_kinds(str(self.subcommand))
        if self.subcommand == "fit" and not config.trainer.fast_dev_run:
            self._claim("fit")
            self.folder.check_config()
        if self._stop is not None and self.subcommand == "fit":
            self._stop.advice = self._advice
        if config.get("ckpt_path") is None and self.subcommand == "fit":
            if not (SLURMEnvironment.detect() and self.folder.requeued()):
                self._check_origin()
                return
            config.ckpt_path = "last"
        elif config.get("ckpt_path") is None:
            config.ckpt_path = self._best()
        path = self.folder.resolve(config.ckpt_path, may_start=self.subcommand == "fit")
        config.ckpt_path = None if path is None else str(path)
        if path is None:
            say(f"no run in {self.folder.path} to continue: starting a new one")
            return
        record = read_checkpoint(path)
        self._resumed_step = int(record["global_step"])  # for a federation, the rounds so far
        if self.subcommand == "fit":
            self._in_place = path.resolve().is_relative_to(self.folder.path.resolve())
            self._check_origin()
            unit = "round" if "pflight" in record else "step"
            say(f"continuing with {unit} {self._resumed_step} from {path}")

    def _pass_seed(self) -> None:
        config = self.config[self.subcommand]
        for _, spec in specs(config):
            options = spec.get("init_args") or {}
            if "seed" in options and options["seed"] is None:
                options["seed"] = int(config.seed_everything)

    def instantiate_classes(self) -> None:
        """Make the model, the data and the Trainer.

        Raises:
            ConfigurationError: If a class can't be made with its options.
        """
        failures: list[ConfigurationError] = []
        with warnings.catch_warnings():  # jsonargparse 4.53 has another way
            warnings.simplefilter("ignore", DeprecationWarning)
            self.parser.add_instantiator(partial(built, failures), object)
        try:
            super().instantiate_classes()
        except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            made = "trainer" if hasattr(self, "config_init") else "a function of the configuration"
            if refused := refusal(error, failures, self.config[self.subcommand], made):
                raise refused from error
            raise

    def _check_origin(self) -> None:
        if not (self._in_place or self.config[self.subcommand].trainer.fast_dev_run):
            self.folder.check_origin()

    def _refused_optimizer(self) -> tuple[str, str] | None:
        """Return the option of the optimizer that can't be built, and the reason."""
        for name, spec in specs(self.config[self.subcommand]):
            kind, options = resolve_name(spec.class_path), spec.get("init_args") or {}
            if isinstance(kind, type) and issubclass(kind, Optimizer):
                reason = why_not_built(kind, dict(options))
                if reason is not None:
                    return name, reason
        return None

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the Trainer, with pflight's monitors if the configuration has none."""
        given = self._get(self.config_init, "trainer")
        if isinstance(self.model, Federation):
            check_strategy(given.strategy)
        callbacks = list(as_list(given.callbacks))
        defaults: list[L.Callback] = []
        if not _any_of(callbacks, TensorBoardReport):
            defaults.append(TensorBoardReport())
        if given.enable_progress_bar is not False and not _any_of(callbacks, ProgressBar):
            defaults.append(FederationProgressBar())
        if not _any_of(callbacks, ResultTable):
            defaults.append(ResultTable())
        if not _any_of(callbacks, ClientTable):
            defaults.append(ClientTable())
        if self.subcommand == "predict" and not _any_of(callbacks, PredictionWriter):
            defaults.append(PredictionWriter())
        if given.enable_checkpointing is not False and not given.fast_dev_run:
            if not _any_of(callbacks, ModelCheckpoint):
                defaults += self._checkpoints()
            elif self._get(self.config, "monitor") is not None:
                raise ConfigurationError(
                    "--monitor has no effect on the ModelCheckpoint of the configuration: set that "
                    "callback's monitor instead"
                )
            elif self._stop is not None:
                last = self.folder.checkpoints / "last.ckpt"
                defaults.append(SaveWhenStopped(self._stop, last))
        if given.logger in (None, True) and not given.fast_dev_run:
            kwargs["logger"] = self._logger()
        callbacks += defaults
        if self._stop is not None:
            callbacks.insert(0, self._stop)
        for report in _of(callbacks, TensorBoardReport):
            config = self.config[self.subcommand]
            report.config = report.config or dumped(self._parser(self.subcommand), config)
            report.hparams = report.hparams or hparams_of_config(config)
        trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        check_processes(trainer, getattr(self.datamodule, "num_clients", None))
        if self._stop is not None:
            self._stop.watch(trainer)
        return trainer

    def fit(self, **kwargs: Any) -> None:
        """Train in the run folder. An earlier run there is moved aside unless it is continued."""
        try:
            self.trainer.fit(**kwargs)
        except RuntimeError as error:
            if str(error).startswith("Early stopping conditioned on"):
                raise ConfigurationError(str(error)) from error
            raise
        if isinstance(self.model, Federation):
            check_trained(self.model.history)

    def _advice(self) -> str:
        """Return the progress of a fit that ended early, and how to continue it."""
        folder = self.folder
        saved = folder.rounds_saved() if self._in_place else None
        done = self.trainer.current_epoch if saved is None and hasattr(self, "trainer") else saved
        if not done:
            return (
                f"before the end of the first round in {folder.path}: start it again with the same "
                "command"
            )
        unit = "round" if isinstance(getattr(self, "model", None), Federation) else "epoch"
        where = f"after {done} {unit}{'s' if done != 1 else ''}"
        if done == self._get(self.config, "trainer").max_epochs:
            return f"{where}, the last of the run"
        if saved is None:
            return f"{where}: there is no checkpoint in {folder.path} to continue from"
        return f"{where}: --ckpt_path last continues the run in {folder.path}"

    def test(self, **kwargs: Any) -> None:
        """Test the clients. Results of an earlier test of this run are replaced."""
        earlier, logger = [], self.trainer.logger
        if isinstance(logger, TensorBoardLogger) and Path(logger.log_dir) == self.folder.path:
            self._claim("test")
            earlier = self.folder.events(_TEST)
        self.trainer.test(**self._without_table(kwargs))
        _remove(earlier)

    def validate(self, **kwargs: Any) -> None:
        """Evaluate the clients on their validation samples."""
        self.trainer.validate(**self._without_table(kwargs))

    def predict(self, **kwargs: Any) -> None:
        """Write the clients' predictions to the run folder."""
        if not isinstance(self.model, Federation):
            raise ConfigurationError(
                "predict writes the predictions of a federation's clients: the model must be a "
                "Federation"
            )
        self.trainer.predict(**{**kwargs, "return_predictions": False})

    def _best(self) -> str:
        """Return the best checkpoint of the run, the default of all commands but ``fit``."""
        folder = self.folder
        try:
            path = folder.resolve("best")
        except ConfigurationError as error:
            every = self._get(self.config, "trainer").check_val_every_n_epoch or 0
            saved = folder.rounds_saved()
            why = "" if saved is None or saved >= every else "; no validation has run"
            raise ConfigurationError(f"{error}{why}; name another with --ckpt_path") from error
        say(f"{self.subcommand} uses {path}, the best of the run (--ckpt_path names another)")
        return str(path)

    @rank_zero_only
    def _claim(self, work: str) -> None:
        """Lock the run folder until this process is done."""
        self._until_done.enter_context(self.folder.claimed(work))
        self._until_done.push(self._undo)

    @rank_zero_only
    def _make_room(self) -> None:
        if not self._in_place and (moved := self.folder.set_aside()):
            say(f"moved the earlier run in {self.folder.path} to {moved}")
        self._in_place = True

    def _undo(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the run folder if the new run failed before it wrote results.

        Ctrl-C leaves the new run in place. It is a ``SystemExit`` if Lightning handles signals.
        """
        if kind is not None:
            self.folder.drop_empty_events()
        if kind not in (None, SystemExit) and self.folder.put_back():
            self._in_place = False
            say(f"moved the earlier run back to {self.folder.path}")

    def _without_table(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        own = isinstance(self.model, Federation)
        return {**kwargs, "verbose": kwargs.get("verbose", True) and not own}

    def _logger(self) -> TensorBoardLogger | bool:
        """Return the TensorBoard logger. A ``validate`` has none, as it would repeat points."""
        if self.subcommand == "fit":  # TensorBoard drops what was logged after the checkpoint
            options: dict[str, Any] = {"purge_step": self._resumed_step}
        elif self.subcommand == "test":
            options = {"filename_suffix": _TEST}
        else:
            return False
        root = self.folder.path
        return TensorBoardLogger(root, name="", version="", default_hp_metric=False, **options)

    def _checkpoints(self) -> list[L.Callback]:
        always: dict[str, Any] = {
            "dirpath": self.folder.checkpoints,
            "save_on_train_epoch_end": True,
            "enable_version_counter": False,  # replace the previous round's file
        }
        last = RunCheckpoint(filename="last", **always)
        monitor, mode = self._get(self.config, "monitor"), self._get(self.config, "mode")
        named = monitor is not None
        client = self.model.client if isinstance(self.model, Federation) else None
        if isinstance(client, Task) and client.judged_by is not None and not named:
            name, mode = client.judged_by
            monitor = f"val/macro_{name}"
        if monitor is not None:
            best = RunCheckpoint(filename="best", monitor=monitor, mode=mode, **always)
            best.strict = named
            return [best, last]
        if self.subcommand == "fit" and client and is_overridden("validation_step", client):
            say(
                f"no best.ckpt is kept: choose a metric that {type(client).__name__} logs, as in "
                "--monitor val/macro_loss --mode min"
            )
        return [last]


def main(
    args: Sequence[str] | None = None,
    run: Callable[[list[str] | None, StopBetweenRounds], object] = FederationCLI,
) -> None:
    """Run the command line. Errors that a user can fix are one line on stderr.

    The exit status is 2 for wrong options or input, 143 for SIGTERM and 130 for Ctrl-C. It is 1
    for a full disk, for a failed client with ``on_client_error="raise"``, or if all clients failed.

    Args:
        args: Arguments in place of those of the process.
        run: The function to run. It gets the arguments and an object that ends a run on a signal.
    """
    quieten()
    stop = StopBetweenRounds()
    try:
        with stop, full_disk_left_to_the_main_thread():
            run(None if args is None else list(args), stop)
    except Exception as error:
        full, cause = full_disk(error), configuration_error(error)
        if full is not None:
            where = f" ({full.filename})" if full.filename else ""
            notes = " ".join(getattr(error, "__notes__", ()))
            fail(f"{cause or f'{full.strerror}{where}'} {stop.advice() or notes}", status=1)
        if isinstance(error, ClientError):
            fail(f"{error}; the run ended {stop.advice()}", status=1)
        if cause is None:
            raise
        fail(str(cause))
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()  # Lightning leaves gloo's threads running


@rank_zero_only
def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)  # a new run may have moved it aside


def _of(callbacks: Sequence[Any], kind: type) -> list[Any]:
    return [callback for callback in callbacks if isinstance(callback, kind)]


def _any_of(callbacks: Sequence[Any], kind: type) -> bool:
    return bool(_of(callbacks, kind))
