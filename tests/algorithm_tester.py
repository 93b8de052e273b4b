"""What every algorithm must stand, whatever it computes. The list is made from methods' entries."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import Centralized, FedAvg, FedFomo, FeSEM, Reptile, ServerCallback, methods
from pflight.callbacks.methods.registry import Method
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.method import PERSONAL
from pflight.models import Classifier, ElasticClient, ProximalClient
from pflight.models.client_methods import Controlled
from pflight.modifiers import Modifier, Private, Proximal, by_name
from pflight.runs.check_state import CheckState
from pflight.states.layers import Layers
from pflight.transforms import Clip, TopK
from tests import own_methods
from tests.remote_clients import ask_remote_clients
from tests.runs import (
    CLASSES,
    FEATURES,
    Adapted,
    assert_same,
    batchnorm_client,
    dropout_client,
    failing,
    network_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
)


class Algorithm(NamedTuple):
    """A server callback, a client module, and how far engines may differ."""

    callback: Callable[[], ServerCallback]
    client: type[Classifier] = Classifier
    tolerance: float = 1e-9

    def plus(self, *modifiers: Modifier) -> Algorithm:
        """Return it with modifiers."""
        return self._replace(callback=lambda: with_modifiers(self.callback(), *modifiers))

    @property
    def refused(self) -> dict[str, str]:
        """What it says to kinds of modifiers that it refuses."""
        names = [name for name, other in ALGORITHMS.items() if other is self]
        return REFUSED.get(names[0], {}) if names else {}

    def taken(self, *modifiers: Modifier) -> list[Modifier]:
        """Return those of the modifiers that it does not refuse."""
        return [one for one in modifiers if one.kind not in self.refused]


def shipped() -> Iterator[Method]:
    """Yield the entries of the shipped methods."""
    for module in pkgutil.iter_modules(methods.__path__):
        found = importlib.import_module(f"{methods.__name__}.{module.name}")
        yield from getattr(found, "METHODS", ())


ALGORITHMS = {
    f"{method.name}-{variant}".removesuffix("-"): Algorithm(
        partial(method.callback, **options),
        Adapted if method.needs == "adapters" else Classifier,
        method.tolerance,
    )
    for method in shipped()
    for variant, options in method.tested.items()
}
ALGORITHMS |= {  # what is no method by itself
    "FedProx-named": Algorithm(FedAvg, ProximalClient),
    "FedEC-named": Algorithm(Reptile, ElasticClient),
    "FedAvg-adapters": Algorithm(FedAvg, Adapted),
    "FeSEM-sample": Algorithm(lambda: FeSEM(2, init_clients=3), ProximalClient),
    "FedDyn-own": Algorithm(own_methods.MyFedDyn),
    "FedBABU-own": Algorithm(lambda: own_methods.MyFedBABU(Layers(types=nn.BatchNorm1d))),
    "Halfway-own": Algorithm(own_methods.Halfway),
    "Scaled-own": Algorithm(own_methods.Scaled),
}
CHOSEN = os.environ.get("PFLIGHT_METHOD", "").lower()
"""Part of the names of the algorithms that `./check method` runs; tests of others are not made."""


ONE_OF_EACH_KIND = ("FedAvg", "FedSGD", "FeSEM", "FedEC", "pFedLA", "Ditto", "SCAFFOLD", "FedRep")
"""Those that average, that cluster, that remember, and so on: `./check fast` runs these."""


def of_each_kind(names: Iterable[str]) -> list[ParameterSet]:
    """Return algorithms as parameters of a test that `./check` runs with one of each kind.

    `./check method` runs it with the first algorithm of the method.
    """
    chosen = [name for name in names if CHOSEN in name.lower()]
    whole = chosen[:1] if CHOSEN else ONE_OF_EACH_KIND
    alike = pytest.mark.alike
    return [pytest.param(name, id=name, marks=() if name in whole else alike) for name in chosen]


class AlgorithmTester:
    """Puts an algorithm through everything that does not depend on its mathematics."""

    @pytest.fixture(scope="class", params=of_each_kind(ALGORITHMS))
    @classmethod
    def algorithm(cls, request: pytest.FixtureRequest) -> Algorithm:
        return ALGORITHMS[request.param]

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, algorithm: Algorithm) -> Federation:
        """Return the run that others are compared with. No test changes it."""
        return cls.train(algorithm)

    @classmethod
    def train(
        cls,
        algorithm: Algorithm,
        rounds: int = 3,
        data: TensorClients | None = None,
        make: Callable[[type[Classifier]], Classifier] = dropout_client,
        kind: type[Classifier] | None = None,
        **options: object,
    ) -> Federation:
        data = small_data(cohort_size=3) if data is None else data
        client = make(algorithm.client if kind is None else kind)
        return run(client, data, algorithm.callback(), rounds, CheckState(), **options)

    @pytest.mark.short("FedAvg", "FeSEM", "pFedLA", "Ditto")
    def test_the_same_seed_gives_the_same_run(
        self, algorithm: Algorithm, trained: Federation
    ) -> None:
        torch.manual_seed(2)
        assert_equal(trained, self.train(algorithm))

    @pytest.mark.each
    def test_resumed_is_uninterrupted(
        self, algorithm: Algorithm, trained: Federation, tmp_path: Path
    ) -> None:
        stopped = self.train(algorithm, rounds=2)
        stopped.trainer.save_checkpoint(tmp_path / "half.ckpt")
        torch.load(tmp_path / "half.ckpt", weights_only=True)
        assert_equal(self.train(algorithm, ckpt_path=tmp_path / "half.ckpt"), trained)

    def test_loaded_is_saved(
        self, algorithm: Algorithm, trained: Federation, tmp_path: Path
    ) -> None:
        trained.trainer.save_checkpoint(tmp_path / "run.ckpt")
        loaded = Federation.load_from_checkpoint(
            tmp_path / "run.ckpt",
            client=dropout_client(algorithm.client),
            callback=algorithm.callback(),
        )
        assert_equal(trained, loaded)

    @pytest.mark.each
    def test_both_engines_agree(self, algorithm: Algorithm) -> None:
        """Also where BatchNorm and momentum keep something of what a client has seen."""
        client_method = algorithm.callback().client_method
        momentum = 0.0 if client_method == Controlled("II") else 0.9  # which it refuses
        sequential, vectorized = (
            self.train(
                algorithm,
                rounds=2,
                data=small_data(cohort_size=4, dtype=torch.float64),
                make=lambda kind: batchnorm_client(
                    kind, optimizer=sgd(0.05, momentum=momentum)
                ).double(),
                engine=engine,
                local_epochs=2,
                trainer={"limit_val_batches": 0},
            )
            for engine in ("sequential", "vectorized")
        )
        assert vectorized.clients.attached_engine.obstacle is None
        models = (sequential.server_states(), vectorized.server_states())
        clients = [[run.client_state(i) for i in range(6)] for run in (sequential, vectorized)]
        for left, right in (models, clients):
            torch.testing.assert_close(
                left, right, rtol=algorithm.tolerance, atol=algorithm.tolerance
            )

    @pytest.mark.short("FedAvg", "FeSEM", "pFedLA", "SCAFFOLD")
    def test_the_callback_is_pickled_and_copied(
        self, algorithm: Algorithm, trained: Federation
    ) -> None:
        callback, data = algorithm.callback(), small_data(cohort_size=3)
        for other in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
            assert type(other) is type(callback)
            assert_equal(run(dropout_client(algorithm.client), data, other, 3), trained)

    @pytest.mark.short("FeSEM", "pFedLA", "FedEC", "SCAFFOLD")
    def test_a_callback_that_was_used_before_is_as_a_new_one(
        self, algorithm: Algorithm, trained: Federation
    ) -> None:
        used, client = algorithm.callback(), dropout_client(algorithm.client)
        run(client, small_data(), used, 3, seed=1)
        assert_equal(run(client, small_data(cohort_size=3), used, 3), trained)

    def test_every_client_can_be_asked_and_tested(self, algorithm: Algorithm) -> None:
        data = small_data(cohort_size=3, holdout_clients=0.34)
        federation = self.train(algorithm, data=data)
        (values,) = federation.trainer.test(federation, datamodule=data, verbose=False)
        for tag in ("test/macro_acc", "test/new/macro_acc", "test/server/micro_f1"):
            assert 0 <= values[tag] <= 1
        assert_finite(federation)
        assert [entry.metrics["clients/sampled"] for entry in federation.history][1:] == [3, 3]
        predictions = quiet_trainer().predict(federation, datamodule=data)
        assert sum(len(chunk.targets) for chunk in predictions) == 6 * 6
        self.newcomers_train_alone(federation, values)

    def newcomers_train_alone(self, federation: Federation, before: Mapping[str, float]) -> None:
        """Members are judged as before if newcomers train, and nobody keeps what they learn."""
        data, clients = federation.clients.attached_data, federation.clients
        if isinstance(federation.callback, Centralized):  # it refuses
            return
        new, memory = data.new_clients.tolist(), clients.memory.state_dict()
        states = [federation.client_module(i).state_dict() for i in range(6)]
        clients.training = replace(clients.training, newcomer_epochs=2)
        (values,) = federation.trainer.test(federation, datamodule=data, verbose=False)
        draws = isinstance(federation.callback, FedFomo)  # what it sends, for a group of clients
        for tag in values.keys() - {"test/bytes_down", "test/bytes_up"}:
            sent = "server/" in tag
            if sent and draws:
                continue
            if sent or not tag.startswith("test/new/"):
                assert values[tag] == pytest.approx(before[tag], nan_ok=True), tag
        assert values["test/new/loss"] != before["test/new/loss"]
        for i, state in enumerate(states):
            after = federation.client_module(i).state_dict()
            assert all(torch.equal(state[n], t) for n, t in after.items()) == (i not in new)
        assert str(clients.memory.state_dict()) == str(memory)

    def test_newcomers_do_not_change_the_others(self, algorithm: Algorithm) -> None:
        """A client's model does not depend on who else is asked."""
        data = small_data(holdout_clients=0.34)
        federation = self.train(algorithm, data=data)
        everybody = federation.callback.personalize(torch.arange(6))
        for i in range(6):
            alone = {name: value[i] for name, value in everybody.items()}
            state = federation.client_state(i)
            assert_same({name: alone[name] for name in state}, state)

    @pytest.mark.short("*-None", "FedAvg-nan", "SCAFFOLD-nan")
    @pytest.mark.filterwarnings("ignore:.*client 3 failed:UserWarning")
    @pytest.mark.parametrize("value", [None, torch.nan])
    def test_a_failing_client_is_left_out(self, algorithm: Algorithm, value: float | None) -> None:
        kind = failing(algorithm.client, value)
        federation = self.train(algorithm, data=small_data(), kind=kind)
        for entry in federation.history:
            assert entry.failed == ([3] if 3 in entry.clients else [])
        assert any(entry.failed for entry in federation.history)
        assert_finite(federation)

    def test_clients_that_never_answer(self, algorithm: Algorithm) -> None:
        federation = self.train(algorithm, rounds=5, data=small_data(dropout=0.6))
        assert any(entry.failed for entry in federation.history)
        assert_finite(federation)

    def test_a_cohort_of_one(self, algorithm: Algorithm) -> None:
        federation = self.train(algorithm, rounds=6, data=small_data(cohort_size=1))
        assert all(len(entry.clients) == 1 for entry in federation.history[1:])
        assert_finite(federation)

    def test_few_clients(self, algorithm: Algorithm) -> None:
        clients = max(1, getattr(algorithm.callback(), "num_clusters", 1))
        assert_finite(self.train(algorithm, data=small_data(counts=[7] * clients)))

    @pytest.mark.short("FedAvg", "FeSEM", "pFedLA", "Ditto", "SCAFFOLD", "FedRep")
    def test_clients_of_one_sample_and_clients_of_none(self, algorithm: Algorithm) -> None:
        data = small_data(counts=[1, 0, 5, 1, 8])
        assert_finite(self.train(algorithm, data=data))
        assert_finite(self.train(algorithm, data=data, make=batchnorm_client))

    @pytest.mark.short("FedAvg", "FedSGD", "FeSEM", "FedEC", "Ditto")
    def test_batchnorm(self, algorithm: Algorithm) -> None:
        federation = self.train(algorithm, make=batchnorm_client)
        template = batchnorm_client(algorithm.client).state_dict()
        for state in [*federation.server_states(), *map(federation.client_state, range(6))]:
            for name, value in state.items():
                assert value.dtype == template[name].dtype
                assert value.shape == template[name].shape
            variances = [value for name, value in state.items() if "running_var" in name]
            assert variances
            assert all((value > 0).all() for value in variances)
        assert_finite(federation)

    @pytest.mark.short("FedAvg", "Ditto", "SCAFFOLD")
    def test_float64(self, algorithm: Algorithm) -> None:
        single = self.train(algorithm, make=two_layers)
        double = self.train(
            algorithm,
            data=small_data(cohort_size=3, dtype=torch.float64),
            make=lambda kind: two_layers(kind).double(),
        )
        by_trainer = self.train(algorithm, make=two_layers, trainer={"precision": "64-true"})
        for i in range(6):
            for federation in (double, by_trainer):
                state = federation.client_state(i)
                assert {value.dtype for value in state.values()} == {torch.float64}
                rounded = {name: value.float() for name, value in state.items()}
                torch.testing.assert_close(rounded, single.client_state(i), rtol=0, atol=1e-4)

    @pytest.mark.each
    def test_clients_may_be_on_machines_of_their_own(
        self, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the server does is told by what clients are sent and send back."""
        options = {"engine": "sequential", "trainer": {"limit_val_batches": 0}}
        here = self.train(algorithm, make=batchnorm_client, **options)
        judged = [here.client_state(i) for i in range(6)]
        ask_remote_clients(monkeypatch)
        there = self.train(algorithm, make=batchnorm_client, **options)
        for left, right in zip(here.server_states(), there.server_states(), strict=True):
            assert_same(left, right)
        for i in range(6):
            assert_same(judged[i], there.client_state(i))
        for one, other in zip(here.history, there.history, strict=True):
            assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)

    @pytest.mark.filterwarnings("ignore:FedSGD . P:UserWarning")
    def test_all_modifiers_together(
        self, algorithm: Algorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are refused in one line, or both engines, a resumed run and remote clients agree."""
        if not (taken := algorithm.taken(*ALL_MODIFIERS)):
            pytest.skip("it refuses all of them")
        both, momentum = algorithm.plus(*taken), 0.9
        if algorithm.callback().client_method == Controlled("II"):
            momentum = 0.0

        def train(rounds: int = 3, engine: str = "sequential", **options: object) -> Federation:
            return self.train(
                both,
                rounds,
                small_data(cohort_size=4, dtype=torch.float64),
                lambda kind: batchnorm_client(
                    kind, optimizer=sgd(0.05, momentum=momentum)
                ).double(),
                engine=engine,
                local_epochs=2,
                trainer={"limit_val_batches": 0},
                **options,
            )

        here, vectorized, stopped = train(), train(engine="vectorized"), train(2)
        assert vectorized.clients.attached_engine.obstacle is None
        models = (here.server_states(), vectorized.server_states())
        judged, others = ([run.client_state(i) for i in range(6)] for run in (here, vectorized))
        for left, right in (models, (judged, others)):
            torch.testing.assert_close(
                left, right, rtol=100 * algorithm.tolerance, atol=algorithm.tolerance
            )
        assert [entry.bytes_up for entry in here.history] == [
            entry.bytes_up for entry in vectorized.history
        ]
        stopped.trainer.save_checkpoint(tmp_path / "half.ckpt")
        torch.load(tmp_path / "half.ckpt", weights_only=True)
        assert_equal(train(ckpt_path=tmp_path / "half.ckpt"), here)
        ask_remote_clients(monkeypatch)
        there = train()
        for left, right in zip(here.server_states(), there.server_states(), strict=True):
            assert_same(left, right)
        for i in range(6):
            assert_same(judged[i], there.client_state(i))

    @pytest.mark.each
    def test_modifiers_are_refused_in_one_line(self, algorithm: Algorithm) -> None:
        refused = [one for one in ALL_MODIFIERS if one.kind in algorithm.refused]
        for one in refused:
            with pytest.raises(ConfigurationError) as error:
                self.train(algorithm.plus(one), make=batchnorm_client)
            said = algorithm.refused[one.kind or ""]
            assert str(error.value) == said.format(type(one).__name__)

    def test_neutral_modifiers_change_no_bit(
        self, algorithm: Algorithm, trained: Federation
    ) -> None:
        """Nor does a clip that no update is long enough for."""
        assert_equal(self.train(algorithm.plus(Proximal(0), Clip(None), TopK(1.0))), trained)
        long = algorithm.taken(Clip(1e6))
        federation = self.train(algorithm.plus(*long))
        assert_equal(federation, trained)
        for one, other in zip(federation.history, trained.history, strict=True):
            assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)

    @pytest.mark.filterwarnings("ignore:FedSGD . P:UserWarning")
    @pytest.mark.short("*-sequential", *(f"{name}-*" for name in ONE_OF_EACH_KIND))
    @pytest.mark.parametrize("engine", ["sequential", "vectorized"])
    @pytest.mark.parametrize(
        "further",
        [
            pytest.param((), id="alone", marks=pytest.mark.each),
            pytest.param((Proximal(0.1), Clip(0.05), TopK(0.3)), id="with others"),
        ],
    )
    def test_a_private_decoy_changes_nothing_else(
        self, algorithm: Algorithm, engine: str, further: tuple[Modifier, ...]
    ) -> None:
        """Distances, norms, corrections and what is stored are of entries that travel."""
        if algorithm in [ALGORITHMS[name] for name in NO_DECOY]:
            pytest.skip("it refuses private parameters")
        private = [] if algorithm is ALGORITHMS["LG-FedAvg"] else [Private(DECOY)]  # it does so
        plain, decoyed = (
            run(
                beside(algorithm.client, decoy),
                small_data(cohort_size=4, dtype=torch.float64),
                algorithm.plus(*algorithm.taken(*further), *private * decoy).callback(),
                2,
                engine=engine,
                trainer={"limit_val_batches": 0},
            )
            for decoy in (False, True)
        )
        added = {*decoyed.layout.private} - {*plain.layout.private}
        assert {name.removeprefix(PERSONAL) for name in added} == {DECOY}
        if engine == "vectorized":
            assert decoyed.clients.attached_engine.obstacle is None
        # FedFomo weighs by differences of losses, which round otherwise beside another.
        tolerance = 1e-12 if isinstance(decoyed.callback, FedFomo) else 0.0
        pairs = [*zip(plain.server_states(), decoyed.server_states(), strict=True)]
        pairs += [(plain.client_state(i), decoyed.client_state(i)) for i in range(6)]
        for left, right in pairs:
            del right[DECOY]
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
        for one, other in zip(plain.history, decoyed.history, strict=True):
            assert (one.clients, one.failed) == (other.clients, other.failed)
            assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)

    @pytest.mark.short("FedAvg", "FeSEM", "FedEC", "Ditto")
    def test_finetuning_changes_no_training(
        self, algorithm: Algorithm, trained: Federation
    ) -> None:
        tuned = self.train(algorithm, finetune_epochs=1)
        for left, right in zip(tuned.server_states(), trained.server_states(), strict=True):
            assert_same(left, right)
        assert "val/finetuned/macro_acc" in tuned.history[-1].metrics

    def test_the_users_client_is_untouched(self, algorithm: Algorithm) -> None:
        client = dropout_client(algorithm.client)
        before = {name: value.clone() for name, value in client.state_dict().items()}
        run(client, small_data(), algorithm.callback(), 2)
        assert_same(dict(client.state_dict()), before)


DECOY = "aside"
"""The parameter of :func:`beside`."""

ALL_MODIFIERS = (Private("norms"), Proximal(0.1), Clip(0.05), TopK(0.3))
"""One of each kind and stage."""

_NOTHING = "its server sends no model, so this would change nothing"
_NORMS = (
    "{0}: Private can't keep network.1.bias, network.1.weight, which {0} itself keeps or replaces"
)


def _because(name: str, **reasons: str) -> dict[str, str]:
    """Return what a method says that can't be combined with modifiers, by their kind."""
    return {kind: f"{name} can't be combined with {{}}: {why}" for kind, why in reasons.items()}


REFUSED = {
    "Local": _because("Local", private=_NOTHING, term=_NOTHING, transform=_NOTHING),
    "FedProto": _because("FedProto", private=_NOTHING, term=_NOTHING, transform=_NOTHING),
    "FedProto-class": _because("FedProto", private=_NOTHING, term=_NOTHING, transform=_NOTHING),
    "L2GD": _because(
        "L2GD",
        private="its clients keep and send all entries",
        term="its clients start from models of their own, and not from the server's",
        transform="its clients also send when they were sent nothing",
    ),
    "FedGH": _because(
        "FedGH",
        private="its clients keep their whole model, and get the server's head",
        term="its server sends a head alone, which clients train no further",
        transform="its clients send prototypes, and no model",
    ),
    **{
        name: _because(
            "FedALT",
            term="its clients start from adapters of their own, and not from the server's",
            transform="its clients send adapters that the server never sent",
        )
        for name in ("FedALT", "FedALT-shared", "FedALT-age")
    },
    **{
        name: _because(
            "HiLoRA", term="its clients start from adapters of their own in the leaf stage"
        )
        for name in ("HiLoRA", "HiLoRA-clusters", "HiLoRA-leaf")
    },
    "APPLE": _because("APPLE", private="its clients mix all entries of each other's models"),
    "pFedHN": _because(
        "PFedHN", private="its hypernetwork generates all layers but those of its own option"
    ),
    "FeSEM-MA": {"private": "matching moves 'network.1.weight', which does not travel"},
    "FedBABU": {"private": _NORMS.format("FedBABU")},  # its head here
    "FedBABU-body": {"private": _NORMS.format("FedBABU")},
}
"""What algorithms say that refuse one of :data:`ALL_MODIFIERS`, by the kind of modifier."""

NO_DECOY = {name for name in REFUSED if not name.startswith(("FedBABU", "HiLoRA"))}
"""Algorithms that don't take a private parameter beside the network."""


def beside(kind: type[Classifier], decoy: bool) -> Classifier:
    """Return a client with a parameter that has a loss of its own beside the network, or not.

    Whatever a method computes of the network must not depend on this parameter if it is private.
    """

    class Beside(kind):  # type: ignore[misc, valid-type]
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = super().loss(batch)
            return loss if self.aside is None else loss + (self.aside - 3).square().sum()

    client = network_client(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), Beside)
    client.register_parameter(DECOY, nn.Parameter(torch.ones(5)) if decoy else None)
    return client.double()


def with_modifiers(callback: ServerCallback, *modifiers: Modifier) -> ServerCallback:
    """Return a callback as if it had been made with modifiers."""
    callback.modifiers = by_name(type(callback).__name__, modifiers)
    if callback.active_modifiers:
        callback._given["modifiers"] = {one.name: one for one in callback.active_modifiers}
    return callback


def two_layers(kind: type[Classifier]) -> Classifier:
    """Return a smooth network, so that a rounded number turns no unit off."""
    return network_client(nn.Sequential(nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)), kind)


def assert_equal(one: Federation, other: Federation) -> None:
    """Compare all models and the cohorts bit for bit."""
    for left, right in zip(one.server_states(), other.server_states(), strict=True):
        assert_same(left, right)
    for i in range(one.num_clients):
        assert_same(one.client_state(i), other.client_state(i))
    assert [entry.clients for entry in one.history] == [entry.clients for entry in other.history]


def assert_finite(federation: Federation) -> None:
    """Look for NaN in every model."""
    clients = range(federation.num_clients)
    for state in [*federation.server_states(), *map(federation.client_state, clients)]:
        assert all(torch.isfinite(value).all() for value in state.values())
