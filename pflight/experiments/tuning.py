"""The choice of a method's settings, with the same number of trials for every method."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from scipy.stats.qmc import Halton

from pflight.errors import ConfigurationError

if TYPE_CHECKING:
    import optuna

Sampler = Literal["tpe", "random"]
FIRST_SEED = 1000
"""Seeds of trials begin here; those of reported runs are below."""
_FREE = 10  # first trials of TPE, independent of other trials


@dataclass(frozen=True)
class Tuning:
    """How settings are chosen.

    Args:
        trials: Number of settings to try for each method. The first settings come from its
            configuration.
        seeds: Number of seeds of each trial.
        sampler: A sampler of Optuna: ``tpe``, which learns from earlier trials, or ``random``.

    Raises:
        ConfigurationError: If an option is out of range, or Optuna is not installed.

    References:
        Akiba et al., Optuna: A Next-generation Hyperparameter Optimization Framework, KDD 2019.
    """

    trials: int
    seeds: int = 1
    sampler: Sampler = "tpe"

    def __post_init__(self) -> None:
        for name in ("trials", "seeds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--tune: {name} must be at least 1")
        if self.sampler not in get_args(Sampler):
            raise ConfigurationError(
                f"--tune: sampler must be {' or '.join(get_args(Sampler))}, got {self.sampler!r}"
            )
        try:
            import optuna  # noqa: F401
        except ImportError as error:
            raise ConfigurationError("--tune needs Optuna: pip install 'pflight[tune]'") from error

    @classmethod
    def of(cls, told: Sequence[str]) -> Tuning:
        """Return the options in ``trials=20 seeds=2 sampler=random``.

        Raises:
            ConfigurationError: If the text has another form.
        """
        options: dict[str, Any] = {}
        for item in told:
            name, _, value = item.partition("=")
            if name in ("trials", "seeds") and value.isdecimal():
                options[name] = int(value)
            elif name == "sampler":
                options[name] = value
            else:
                raise ConfigurationError(
                    f"--tune takes trials=N, seeds=N and sampler=tpe or random, got {item!r}"
                )
        if "trials" not in options:
            raise ConfigurationError("--tune needs the number of trials, as in --tune trials=20")
        return cls(**options)

    @property
    def used_seeds(self) -> list[int]:
        """The seeds of trials."""
        return [FIRST_SEED + index for index in range(self.seeds)]


class Study:
    """The trials of one method.

    Each process runs Optuna again. Its proposals are reproducible, so only the runs of the trials
    are kept. Trials that do not learn from others may run at the same time. For TPE they are points
    of a Halton sequence, so a few of them cover the ranges. The first options, such as the clients'
    learning rate, get the same values for all methods. The first trial has the method's own values.
    Optuna learns from it if it could have drawn these values.

    Args:
        tuning: How settings are chosen.
        space: The options, each with a range or values.
        before: The options' values in the method's configuration.
        name: The method's name, for messages; draws also depend on it.

    Raises:
        ConfigurationError: If a range is not valid.
    """

    def __init__(
        self, tuning: Tuning, space: Mapping[str, Any], before: Mapping[str, Any], name: str
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.tuning = tuning
        self.space = {o: _distribution(o, told, before.get(o)) for o, told in space.items()}
        self._own = {option: before.get(option) for option in space}
        # A method's draws depend on nothing but the method.
        seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
        sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
        self._free = tuning.trials
        if tuning.sampler == "tpe":
            self._free = _FREE
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_FREE)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        first = {o: _drawn(values, self._own[o]) for o, values in self.space.items()}
        self._could_draw_own = None not in first.values()
        self._study.enqueue_trial({o: v for o, v in first.items() if v is not None})
        if tuning.sampler == "tpe":
            for point in Halton(len(self.space), scramble=False).random(_FREE)[1:]:  # after the 0
                places = zip(self.space.items(), point, strict=True)
                self._study.enqueue_trial({o: _at(values, place) for (o, values), place in places})
        self._trials: list[optuna.Trial] = []
        self._reached: list[float] = []

    @property
    def told(self) -> int:
        """Number of trials that have ended."""
        return len(self._reached)

    def pending(self) -> list[dict[str, Any]]:
        """Return the settings of trials that have begun or can begin, and have no result yet.

        They are in order, and :meth:`tell` takes them in that order.
        """
        while len(self._trials) < self.tuning.trials and (
            len(self._trials) < self._free or self.told == len(self._trials)
        ):
            self._trials.append(self._study.ask(self.space))
        return self._tried[self.told :]

    @property
    def _tried(self) -> list[dict[str, Any]]:
        """The settings of the trials that have begun; the first are the method's own."""
        return [_settings(t.params) if t.number else self._own for t in self._trials]

    def tell(self, value: float) -> None:
        """Take the value of the first pending trial; higher is better, NaN means failed."""
        from optuna.trial import TrialState

        trial = self._trials[self.told]
        learns = math.isfinite(value) and (trial.number or self._could_draw_own)
        self._study.tell(trial, value if learns else None, None if learns else TrialState.FAIL)
        self._reached.append(value)

    def limits(self, option: str) -> list[Any]:
        """Return the values of an option, or the ends of its range."""
        values = self.space[option]
        return [json.loads(v) for v in getattr(values, "choices", [])] or [values.low, values.high]

    @property
    def done(self) -> bool:
        """Whether all trials have ended."""
        return self.told == self.tuning.trials

    @property
    def best(self) -> tuple[dict[str, Any], float] | None:
        """The best settings with their value; ``None`` if all trials failed."""
        told = zip(self._tried, self._reached, strict=False)
        known = [trial for trial in told if math.isfinite(trial[1])]
        return max(known, key=lambda trial: trial[1], default=None)


def _distribution(option: str, told: Any, before: Any = None) -> Any:
    """Return Optuna's form of a range or of a list of values.

    A range between whole numbers has whole numbers only, unless the option's own value is a float.

    Example:
        >>> _distribution("lr", {"low": 0.01, "high": 1, "log": True})
        FloatDistribution(high=1.0, log=True, low=0.01, step=None)
        >>> _distribution("lr", {"low": 0, "high": 1}, before=0.1)
        FloatDistribution(high=1.0, log=False, low=0.0, step=None)
        >>> _distribution("mu", [0.1, 1.0])
        CategoricalDistribution(choices=('0.1', '1.0'))
    """
    from optuna import distributions

    if isinstance(told, Sequence) and not isinstance(told, str) and told:
        return distributions.CategoricalDistribution([json.dumps(value) for value in told])
    try:
        low, high = told["low"], told["high"]
        more = {name: told[name] for name in told if name not in ("low", "high")}
        if isinstance(low, int) and isinstance(high, int) and not isinstance(before, float):
            return distributions.IntDistribution(low, high, **more)
        return distributions.FloatDistribution(low, high, **more)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"search_space: {option} must be a list of values, or a range such as "
            f"{{low: 0.01, high: 1.0, log: true}}, got {told}: {error}"
        ) from error


def _drawn(distribution: Any, value: Any) -> Any:
    """Return an option's value as if it had been drawn; ``None`` if it can't be."""
    from optuna.distributions import CategoricalDistribution

    if isinstance(distribution, CategoricalDistribution):
        return next((text for text in distribution.choices if json.loads(str(text)) == value), None)
    number = isinstance(value, int | float)
    return value if number and distribution.low <= value <= distribution.high else None


def _at(distribution: Any, place: float) -> Any:
    """Return the value at a place of a range, from 0 up to 1.

    Example:
        >>> [_at(_distribution("lr", {"low": 0.01, "high": 1.0, "log": True}), u) for u in (0, 0.5)]
        [0.01, 0.1]
        >>> [_at(_distribution("k", {"low": 1, "high": 4}), u) for u in (0, 0.5, 0.99)]
        [1, 3, 4]
    """
    from optuna.distributions import CategoricalDistribution

    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(place * len(distribution.choices))]
    low, step = distribution.low, distribution.step or 0
    high = distribution.high + step
    value = low * (high / low) ** place if distribution.log else low + (high - low) * place
    return low + step * int((value - low) / step) if step else value


def _settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return drawn values of options, to three digits, as they will be reported."""
    read = {o: json.loads(v) if isinstance(v, str) else v for o, v in params.items()}
    return {o: float(f"{v:.3g}") if isinstance(v, float) else v for o, v in read.items()}
