"""The command line ``pflight fit|validate|test|predict``, built on LightningCLI."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NoReturn

import lightning as L
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer

# These imports also import their packages, whose classes are then known by their short names.
from .callbacks.monitors.progress import FederationProgressBar
from .callbacks.monitors.report import PredictionWriter, ResultTable
from .callbacks.monitors.tensorboard import Primitive, TensorBoardReport
from .checkpoint import read_checkpoint
from .checks import check_processes, check_strategy
from .config_files import MODE, check_config_file
from .errors import ClientError, ConfigurationError
from .federation import Federation
from .files import causes, full_disk, full_disk_left_to_the_main_thread
from .history import check_trained
from .options import why_not_built
from .parser import FederationParser, refusal, specs
from .runs import RunFolder
from .server_callback import ServerCallback
from .shipped import find_config, no_config
from .signals import SaveWhenStopped, StopBetweenRounds
from .task import Task
from .version import __version__

__all__ = ["FederationCLI", "config_file", "main"]

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
_RANK_0_FIRST = 5.0  # seconds
_TEST = ".test"
_FEDERATION = {
    "class_path": "pflight.Federation",
    "init_args": {"client": {"class_path": "pflight.models.Classifier"}},
}


class FederationCLI(LightningCLI):
    """LightningCLI for federations, with one run in one folder.

    The model is a :class:`~pflight.Federation` unless another class is named, its client a
    :class:`~pflight.models.Classifier`. The run folder is ``trainer.default_root_dir``. Unless the
    configuration has a logger or a ``ModelCheckpoint`` of its own, a ``fit`` writes there

    - ``config.yaml`` and TensorBoard's events,
    - ``checkpoints/last.ckpt`` after every round, and
    - ``checkpoints/best.ckpt``, chosen by ``--monitor`` and ``--mode``; ready-made tasks have
      defaults for both.

    ``--ckpt_path last`` and ``best`` mean these files; all commands but ``fit`` use ``best`` by
    default. Only one ``fit`` at a time can write to a folder.

    Args:
        args: Arguments in place of those of the process.
        stop: Ends a run when a signal comes; by default signals are left to Lightning.
    """

    def __init__(
        self, args: list[str] | None = None, stop: StopBetweenRounds | None = None
    ) -> None:
        self._stop = stop
        self._resumed_step: int | None = None
        self._in_place = False  # whether the files in the run folder are this run's
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
        """Parse the arguments; a config file that does not exist is sought among those shipped."""
        given = args if isinstance(args, list) else sys.argv[1:]
        commands = {name: self._parser(name) for name in self.subcommands()}
        try:
            self.config = parser.parse_run(_with_shipped_configs(given), commands)
        except UnicodeDecodeError as error:  # in the file of an option, such as --trainer
            raise ConfigurationError(f"a file among the options is not text: {error}") from error
        self._check_options(self.config[self.config.subcommand])

    def _check_options(self, config: Namespace) -> None:
        """Raise for options on which Lightning would fail with a traceback."""
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
        """Take no options from the checkpoint: the configuration has them."""

    @cached_property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self._get(self.config, "trainer").default_root_dir)

    def before_instantiate_classes(self) -> None:
        """Pass ``seed_everything`` to model and data with seed 0, and find the checkpoint."""
        self._pass_seed()
        config = self.config[self.subcommand]
        if not config.trainer.fast_dev_run:
            self.folder.check_kinds(str(self.subcommand))
        if self.subcommand == "fit" and not config.trainer.fast_dev_run:
            self._claim("fit")
            self.folder.check_config()
        if self._stop is not None and self.subcommand == "fit":
            self._stop.advice = self._advice
        if config.get("ckpt_path") is None and self.subcommand == "fit" and self._is_requeued():
            config.ckpt_path = "last"
        if config.get("ckpt_path") is None:
            if self.subcommand == "fit":
                self._check_origin()
                return
            config.ckpt_path = self._best()
        path = self.folder.resolve(config.ckpt_path, may_start=self.subcommand == "fit")
        config.ckpt_path = None if path is None else str(path)
        if path is None:
            _say(f"no run in {self.folder.path} to continue: starting a new one")
            return
        record = read_checkpoint(path)
        self._resumed_step = int(record["global_step"])  # for a federation, the rounds so far
        if self.subcommand == "fit":
            self._in_place = path.resolve().is_relative_to(self.folder.path.resolve())
            self._check_origin()
            unit = "round" if "pflight" in record else "step"
            _say(f"continuing with {unit} {self._resumed_step} from {path}")

    def _pass_seed(self) -> None:
        config = self.config[self.subcommand]
        for part in (config.model, config.data):
            options = part.get("init_args")
            if options is not None and options.get("seed") == 0:
                options.seed = int(config.seed_everything)

    def instantiate_classes(self) -> None:
        """Make the model, the data and the Trainer.

        Raises:
            ConfigurationError: If a class can't be made with its options.
        """
        try:
            super().instantiate_classes()
        except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            if reason := refusal(error):
                raise ConfigurationError(reason) from error
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

    def _is_requeued(self) -> bool:
        return SLURMEnvironment.detect() and bool(self.folder.requeued())

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the Trainer, with pflight's monitors where the configuration has none."""
        given = self._get(self.config_init, "trainer")
        if isinstance(self.model, Federation):
            check_strategy(given.strategy)
        callbacks = list(_as_list(given.callbacks))
        defaults: list[L.Callback] = []
        if not _any_of(callbacks, TensorBoardReport):
            defaults.append(TensorBoardReport())
        if given.enable_progress_bar is not False and not _any_of(callbacks, ProgressBar):
            defaults.append(FederationProgressBar())
        if not _any_of(callbacks, ResultTable):
            defaults.append(ResultTable())
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
            report.config = report.config or self._dump()
            report.hparams = report.hparams or _hparams(self.config[self.subcommand])
        trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        check_processes(trainer, getattr(self.datamodule, "num_clients", None))
        if self._stop is not None:
            self._stop.watch(trainer)
        return trainer

    def fit(self, **kwargs: Any) -> None:
        """Train in the run folder; an earlier run there is moved aside unless it is continued."""
        try:
            self.trainer.fit(**kwargs)
        except RuntimeError as error:
            if str(error).startswith("Early stopping conditioned on"):
                raise ConfigurationError(str(error)) from error
            raise
        if isinstance(self.model, Federation):
            check_trained(self.model.history)

    def _advice(self) -> str:
        """Return how far a fit that ended early has come, and how to continue it."""
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
        """Test the clients; results of an earlier test of this run are replaced."""
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
            raise ConfigurationError(f"{error}; name another with --ckpt_path") from error
        _say(f"{self.subcommand} uses {path}, the best of the run (--ckpt_path names another)")
        return str(path)

    @rank_zero_only
    def _claim(self, work: str) -> None:
        """Lock the run folder until this process is done."""
        self._until_done.enter_context(self.folder.claimed(work))
        self._until_done.push(self._undo)

    @rank_zero_only
    def _make_room(self) -> None:
        if not self._in_place and (moved := self.folder.set_aside()):
            _say(f"moved the earlier run in {self.folder.path} to {moved}")
        self._in_place = True

    def _undo(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the run folder if an error came before the new run wrote anything of worth.

        Ctrl-C, a ``SystemExit`` where signals are left to Lightning, leaves the new run in place.
        """
        if kind is not None:
            self.folder.drop_empty_events()
        if kind not in (None, SystemExit) and self.folder.put_back():
            self._in_place = False
            _say(f"moved the earlier run back to {self.folder.path}")

    def _without_table(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        own = isinstance(self.model, Federation)
        return {**kwargs, "verbose": kwargs.get("verbose", True) and not own}

    def _logger(self) -> TensorBoardLogger | bool:
        """Return the TensorBoard logger; a ``validate`` has none, as it would repeat points."""
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
            _say(
                f"no best.ckpt is kept: choose a metric that {type(client).__name__} logs, as in "
                "--monitor val/macro_loss --mode min"
            )
        return [last]

    def _dump(self) -> str:
        return _dumped(self._parser(self.subcommand), self.config[self.subcommand])


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that finds its files again after the run folder was moved.

    Unless it is ``strict``, it ignores that its metric is missing.
    """

    strict = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, with the paths of the files as they are now."""

        def here(path: str) -> str:
            return str(Path(str(self.dirpath), Path(path).name)) if path else path

        paths = ("best_model_path", "kth_best_model_path", "last_model_path")
        moved = {name: here(state_dict[name]) for name in paths}
        best = {here(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict(
            {**state_dict, **moved, "best_k_models": best, "dirpath": self.dirpath}
        )
        self.current_score = state_dict["current_score"]  # which the next checkpoint has, too


class SaveRunConfig(SaveConfigCallback):
    """Saves the configuration of a ``fit`` to the run folder, without ``ckpt_path``.

    It does so right before training, when everything has been checked.

    Args:
        make_room: Called first; moves an earlier run out of the way.
    """

    def __init__(
        self, parser: LightningArgumentParser, config: Namespace, make_room: Callable[[], None]
    ) -> None:
        super().__init__(parser, config)
        self.make_room = make_room

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write nothing yet."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``config.yaml``; the other ranks wait for it."""
        if trainer.is_global_zero:
            self.make_room()
            RunFolder(trainer.default_root_dir).save_config(_dumped(self.parser, self.config))
        trainer.strategy.barrier()


def main(
    args: Sequence[str] | None = None,
    run: Callable[[list[str] | None, StopBetweenRounds], object] = FederationCLI,
) -> None:
    """Run the command line; errors that a user can mend are one line on stderr.

    The exit status is 2 for wrong options or input, 1 for a full disk, a failed client with
    ``on_client_error="raise"`` or a run in which all failed, 143 for SIGTERM and 130 for Ctrl-C.

    Args:
        args: Arguments in place of those of the process.
        run: What to run with the arguments, and with what ends a run when a signal comes.
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


def fail(message: str, status: int = 2) -> NoReturn:
    """Print one line and exit; other ranks wait for rank 0, which ends them if it fails as well."""
    rank = getattr(rank_zero_only, "rank", None) or 0
    if rank:
        time.sleep(_RANK_0_FIRST)
        message = f"rank {rank}: {message}"
    sys.stderr.write(f"pflight: error: {' '.join(message.split())}\n")
    sys.exit(status)


def configuration_error(error: BaseException) -> BaseException | None:
    """Return the configuration error, pflight's or Lightning's, that caused an exception."""
    kinds = (ConfigurationError, MisconfigurationException)
    return next((cause for cause in causes(error) if isinstance(cause, kinds)), None)


@rank_zero_only
def _say(line: str) -> None:
    print(f"pflight: {line}", flush=True)


@rank_zero_only
def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)  # a new run may have moved it aside


def _with_shipped_configs(args: Sequence[str]) -> list[str]:
    """Return the arguments, with paths of shipped configs for config files that don't exist."""
    found = list(args)
    for position, arg in enumerate(found):
        option, equals, value = arg.partition("=")
        if option not in ("--config", "-c"):
            continue
        if equals:
            found[position] = f"{option}={config_file(value)}"
        elif position + 1 < len(found):
            found[position + 1] = config_file(found[position + 1])
    return found


def config_file(path: str) -> str:
    """Return the path of a config file, which may be one of those that come with pflight.

    Raises:
        ConfigurationError: If there is none, or it can't be read.
    """
    found = find_config(path)
    if found is None:
        raise ConfigurationError(no_config(path))
    if found == path:
        check_config_file(path)
    return found


def _dumped(parser: Any, config: Namespace) -> str:
    """Return the configuration as YAML, without ``ckpt_path`` and ``allow_other_data``."""
    config = config.clone()
    config.ckpt_path = None
    options: Any = config.model.get("init_args") or {}
    if options.get("allow_other_data"):
        options.allow_other_data = False  # it holds for one resume only
    with warnings.catch_warnings():  # jsonargparse 4.49 renamed the argument
        warnings.simplefilter("ignore", DeprecationWarning)
        return parser.dump(config, skip_none=False)


def _hparams(config: Namespace) -> dict[str, Primitive]:
    """Flatten the options by which runs differ: algorithm, client, data, optimizer and rounds."""
    trainer, model, data = (config[name].as_dict() for name in ("trainer", "model", "data"))
    flat: dict[str, Primitive] = {"rounds": trainer["max_epochs"] or 0}
    for spec in _as_list(trainer["callbacks"]):
        kind = resolve_name(spec["class_path"])
        if isinstance(kind, type) and issubclass(kind, ServerCallback):
            flat.update(_flatten("algorithm", spec))
    options = dict(model.get("init_args") or {})
    if (client := options.pop("client", None)) is not None:
        flat.pop("algorithm", None)  # the federation knows a better name
        flat.update(_flatten("client", client))
        flat.update(_flatten("federation", options))
    else:
        flat.update(_flatten("model", model))
    return flat | dict(_flatten("data", data))


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Primitive]]:
    if isinstance(value, Mapping) and "class_path" in value:
        yield key, value["class_path"].rpartition(".")[2]
        value = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flatten(f"{key}/{name}", part)
    elif isinstance(value, list):
        yield key, str(value)
    elif isinstance(value, Primitive):
        yield key, value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _of(callbacks: Sequence[Any], kind: type) -> list[Any]:
    return [callback for callback in callbacks if isinstance(callback, kind)]


def _any_of(callbacks: Sequence[Any], kind: type) -> bool:
    return bool(_of(callbacks, kind))


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    return f"warning: {' '.join(str(message).split())}\n"


def quieten() -> None:
    """Silence what libraries print at every start; print pflight's own warnings as one line."""
    warnings.formatwarning = _format_warning
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.pflight").setLevel(logging.INFO)
    for message in (
        r".*does not have many workers",
        r".*isinstance\(treespec, LeafSpec\).*",
        r".*Checkpoint directory .* exists and is not empty",
        r".*GPU available but not used",
        r".*Checkpoint\(monitor='val/macro_\w+'\)` could not find",  # not validated yet
        r".*The number of training batches .* is smaller than the logging interval",
    ):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="lightning")
