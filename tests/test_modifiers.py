"""Private layers, terms and transforms beside a method: what is the same, kept, and refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import (
    APPLE,
    GPFL,
    IFCA,
    MOON,
    SCAFFOLD,
    Ditto,
    FedAS,
    FedAvg,
    FedBABU,
    FedCP,
    FedEC,
    FedLC,
    FedNova,
    FedPAC,
    FedProx,
    FedRep,
    FedRoD,
    FedSGD,
    FeSEM,
    Local,
    PerFedAvg,
    PFedFDA,
    PFedMe,
    Reptile,
    ServerCallback,
    SharedPart,
)
from pflight.errors import ClientError, ConfigurationError
from pflight.local_client import LocalClient
from pflight.models import Classifier, ElasticClient
from pflight.modifiers import (
    CONSTRAINT,
    Elastic,
    Frozen,
    Modifier,
    Private,
    Proximal,
    Term,
    by_name,
)
from pflight.states.layers import Layers
from pflight.states.state import StateLayout
from pflight.transforms.base import Draw, Transform
from pflight.transforms.clip import Clip
from pflight.transforms.top_k import TopK
from tests.algorithm_tester import assert_equal
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    ByHand,
    assert_same,
    batchnorm_client,
    dropout_client,
    linear_client,
    network_client,
    one_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
)

HEAD = ["network.3.bias", "network.3.weight"]
NORMS = [
    "network.1.bias",
    "network.1.num_batches_tracked",
    "network.1.running_mean",
    "network.1.running_var",
    "network.1.weight",
]
BODY = ["network.0.bias", "network.0.weight", *NORMS]
BATCHNORM = nn.modules.batchnorm._BatchNorm


def train(callback: ServerCallback, rounds: int = 3, **options: Any) -> Federation:
    return run(batchnorm_client(), small_data(cohort_size=4), callback, rounds, **options)


def names(chosen: Any, module: nn.Module | None = None) -> list[str]:
    """Return the entries that a choice of layers means, sorted."""
    module = batchnorm_client() if module is None else module
    return sorted(Private(chosen).names(module, StateLayout.of(module)))


def assert_alike(one: Federation, other: Federation) -> None:
    """Compare models, clients, cohorts and bytes bit for bit."""
    assert_equal(one, other)
    for left, right in zip(one.history, other.history, strict=True):
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)


def refusal(callback: ServerCallback, client: Classifier | None = None, **options: Any) -> str:
    """Return the one line in which a run is refused."""
    client = batchnorm_client() if client is None else client
    with pytest.raises(ConfigurationError) as error:
        run(client, small_data(), callback, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# The same as methods that have a name


@ENGINES
@pytest.mark.parametrize(
    ("named", "combined"),
    [
        pytest.param(
            lambda: SharedPart(Layers(head=True)),
            lambda: FedAvg(modifiers=[Private("head")]),
            id="FedPer",
        ),
        pytest.param(
            lambda: SharedPart(Layers(types=BATCHNORM)),
            lambda: FedAvg(modifiers=[Private("norms")]),
            id="FedBN",
        ),
        pytest.param(
            lambda: SharedPart(shared=Layers(head=True)),
            lambda: FedAvg(modifiers=[Private("body")]),
            id="LG-FedAvg",
        ),
        pytest.param(lambda: FedProx(0.1), lambda: FedAvg(modifiers=[Proximal(0.1)]), id="FedProx"),
        pytest.param(
            lambda: FedProx(0.1, "eq7"),
            lambda: FedAvg(modifiers=[Proximal(0.1, "eq7")]),
            id="FedProx-eq7",
        ),
        pytest.param(
            lambda: FeSEM(2, mu=0.1, scaling="plain"),
            lambda: FeSEM(2, modifiers=[Proximal(0.1)]),
            id="FeSEM",
        ),
        pytest.param(
            lambda: FeSEM("auto", candidates=(1, 2), criterion="distance", mu=0.1, scaling="plain"),
            lambda: FeSEM(
                "auto", candidates=(1, 2), criterion="distance", modifiers=[Proximal(0.1)]
            ),
            id="FeSEM-auto",
        ),
    ],
)
def test_a_method_with_a_name_is_its_combination(
    named: Callable[[], ServerCallback], combined: Callable[[], ServerCallback], engine: str
) -> None:
    one, other = (train(make(), engine=engine, local_epochs=2) for make in (named, combined))
    assert_alike(one, other)
    if isinstance(one.callback, FeSEM):
        assert one.callback.selection == other.callback.selection


@pytest.mark.parametrize(
    ("modifiers", "name"),
    [
        ([Private("head")], "FedPer"),
        ([Private("body")], "LG-FedAvg"),
        ([Private("norms")], "FedBN"),
        ([Proximal(0.1)], "FedProx"),
        ([Proximal(0.1), Private("head")], "FedAvg + private head + proximal"),
        ([Private(["head", "norms"], keep=False)], "FedAvg + private head and norms (not kept)"),
        ([Private(Layers(first=1)), Clip(1.0)], "FedAvg + clip + private layers"),
        ([Proximal(0.0), Clip(None), TopK(1)], "FedAvg"),
        ([TopK(0.5)], "FedAvg + top k"),
    ],
)
def test_results_have_the_names_of_modifiers(modifiers: list[Modifier], name: str) -> None:
    assert train(FedAvg(modifiers=modifiers), 1).callback.name_in_results == name


# Lists and mappings


def test_lists_and_mappings_in_any_order_are_the_same() -> None:
    parts = [Private("head"), Proximal(0.1), Clip(0.05), TopK(0.3)]
    keyed = {one.name: one for one in parts}
    ways = (parts, parts[::-1], tuple(parts), keyed, dict([*keyed.items()][::-1]))
    first, *others = (FeSEM(2, modifiers=way) for way in ways)
    assert [*first.modifiers] == ["clip", "private", "proximal", "top_k"]
    for other in others:
        assert [*other.modifiers.items()] == [*first.modifiers.items()]
        assert other._given == first._given
    runs = [train(FeSEM(2, modifiers=way)) for way in (parts, parts[::-1], keyed)]
    for other in runs[1:]:
        assert_alike(runs[0], other)


@pytest.mark.parametrize("given", [None, [], {}])
def test_no_modifiers_are_none(given: Any) -> None:
    callback = FedAvg(modifiers=given)
    assert callback.modifiers == {}
    assert callback._given == FedAvg()._given


def test_a_method_of_ones_own_has_the_option_too() -> None:
    class Mine(FedAvg):
        def __init__(self, power: float = 2.0, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.power = power

    class Yours(Mine):
        """Without a constructor."""

    for kind in (Mine, Yours):
        callback = kind(3.0, "uniform", modifiers=[Proximal(0.1)])
        assert (callback.power, callback.weighting) == (3.0, "uniform")
        assert callback.modifiers == {"proximal": Proximal(0.1)}
        assert_alike(train(callback), train(FedAvg("uniform", modifiers=[Proximal(0.1)])))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [Private("head"), Private("norms")],
            "FedAvg: two modifiers are called private: give one that does all",
        ),
        (
            [Proximal, Clip()],
            "FedAvg: modifiers must be objects of pflight.modifiers, got "
            "<class 'pflight.modifiers.Proximal'>",
        ),
        (
            ["head"],
            "FedAvg: modifiers must be objects of pflight.modifiers, got 'head'",
        ),
        (
            {"proximal": Private("head")},
            "FedAvg: the modifier Private is called private, not proximal",
        ),
        (
            {"proximal": {"mu": 0.1}},
            "FedAvg: modifiers must be objects of pflight.modifiers, got {'mu': 0.1}",
        ),
    ],
)
def test_odd_modifiers_are_refused_at_once(given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        FedAvg(modifiers=given)
    assert str(error.value) == said


def test_a_single_modifier_without_a_list_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"FedAvg: modifiers must be a list, .*Proximal"):
        FedAvg(modifiers=Proximal(0.1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Private([]), "Private: name the layers"),
        (lambda: Private(""), "Private: name the layers"),
        (lambda: Proximal(-0.1), "Proximal: mu must be"),
        (lambda: Proximal(0.1, "eq9"), "Proximal: scaling must be"),
        (lambda: Clip(0), "Clip: norm must be"),
        (lambda: Clip(torch.inf), "Clip: norm must be"),
        (lambda: TopK(0), "TopK: fraction must be"),
        (lambda: TopK(1.1), "TopK: fraction must be"),
    ],
)
def test_options_out_of_range_are_refused_at_once(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        make()
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_selection_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Private: .*3"):
        Private(["head", 3])


def test_a_federation_takes_one_server_callback() -> None:
    with pytest.raises(ConfigurationError, match="takes one server callback, got FedAvg and FeSEM"):
        run(linear_client(), small_data(), FedAvg(modifiers=[Clip()]), 1, FeSEM(2))


# As objects


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (Private(["head", "*lora_B*"]), "Private(layers=['*lora_B*', 'head'], keep=True)"),
        (Proximal(0.5, "eq7"), "Proximal(mu=0.5, scaling='eq7')"),
        (Clip(), "Clip(norm=1.0)"),
        (TopK(0.2, error_feedback=False), "TopK(fraction=0.2, error_feedback=False)"),
    ],
)
def test_modifiers_are_values(one: Modifier, words: str) -> None:
    assert repr(one) == words
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), eval(words)):
        assert other == one
        assert hash(other) == hash(one)
    assert one != Private(Layers(first=1))
    assert one != words
    callback = FedAvg(modifiers=[one])
    for same in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert same.modifiers == callback.modifiers
        assert same._given == callback._given


def test_other_options_are_another_modifier() -> None:
    assert Private("head") != Private("norms")
    assert Private("head") != Private("head", keep=False)
    assert Proximal(0.1) != Proximal(0.2)
    assert Private(Layers(first=1)) == Private(Layers(first=1))


def test_names_come_from_classes() -> None:
    class SharpnessAware(Term):
        """A made-up one."""

    assert (Private.name, TopK.name, SharpnessAware.name) == ("private", "top_k", "sharpness_aware")
    assert SharpnessAware().title == "sharpness aware"


def test_base_classes_say_what_is_missing() -> None:
    client = one_client(linear_client(), FedAvg().client_method)
    with pytest.raises(NotImplementedError, match=r"Term does not define value\(\)"):
        Term().value(client)
    with pytest.raises(NotImplementedError, match=r"Transform does not define __call__\(\)"):
        Transform()(torch.zeros(1, 1), Draw([], torch.zeros(1, 1)))
    with pytest.raises(NotImplementedError, match=r"Transform does not define unpack\(\)"):
        Transform().unpack({}, 1)


# One run after another


def test_a_later_run_knows_nothing_of_an_earlier_ones_modifiers() -> None:
    before = train(FedAvg())
    train(FedAvg(modifiers=[Private("head"), Proximal(0.5), Clip(0.05), TopK(0.3)]))
    assert_alike(train(FedAvg()), before)
    assert FedAvg.client_method.terms == ServerCallback.client_method.terms == ()


def test_the_module_that_names_a_method_stays_as_it_was() -> None:
    client = linear_client()
    client.client_method = FedProx(0.1).client_method
    before = run(client, small_data(), FedAvg(), 2)
    run(client, small_data(), FedAvg(modifiers=[Proximal(0.7)]), 2)
    assert client.client_method.terms == ()
    assert_alike(run(client, small_data(), FedAvg(), 2), before)


def test_a_term_adds_nothing_to_private_entries_that_a_module_optimizes_by_hand() -> None:
    def trained(kind: type[Classifier]) -> Federation:
        callback = FedAvg(modifiers=[Proximal(0.5), Private("network.bias")])
        return run(linear_client(kind), small_data(), callback, 3, engine="sequential")

    by_hand, usual = trained(ByHand), trained(Classifier)
    for client in range(small_data().num_clients):
        torch.testing.assert_close(by_hand.client_state(client), usual.client_state(client))


@ENGINES
def test_terms_add_up(engine: str) -> None:
    """Two pulls of 0.1 and 0.2 are one of 0.3, and the order is that of names."""
    both = train(FedProx(0.1, modifiers=[Proximal(0.2)]), engine=engine)
    one = train(FedProx(0.3), engine=engine)
    for left, right in zip(both.server_states(), one.server_states(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


# Going on


ALL = (Private("norms"), Proximal(0.1), Clip(0.5), TopK(0.3))


def test_another_trainer_needs_the_same_modifiers() -> None:
    federation = train(FedAvg(modifiers=ALL), 2)
    for others in ([], ALL[:3], (*ALL[:3], TopK(0.4))):
        with pytest.raises(ConfigurationError, match=r"this federation was trained with FedAvg"):
            quiet_trainer(3, FedAvg(modifiers=others)).fit(federation, datamodule=small_data())
    quiet_trainer(3, FedAvg(modifiers=ALL[::-1])).test(federation, datamodule=small_data())
    trainer = quiet_trainer(1)
    (values,) = trainer.test(federation, datamodule=small_data(), verbose=False)
    assert 0 <= values["test/macro_acc"] <= 1
    assert federation.callback.modifiers == by_name("FedAvg", ALL)


def test_one_without_effect_is_no_other_option() -> None:
    federation = train(FedAvg(modifiers=[Proximal(0), Clip(0.5)]), 1)
    for others in ([Clip(0.5)], [Clip(0.5), TopK(1.0)]):
        quiet_trainer(2, FedAvg(modifiers=others)).fit(federation, datamodule=small_data())
    assert FedAvg(modifiers=[Clip(None)])._given == FedAvg()._given


@pytest.mark.parametrize(
    "make",
    [
        FedAvg,
        lambda **options: FeSEM("auto", candidates=(1, 2), criterion="distance", **options),
    ],
)
def test_going_on_from_a_checkpoint_needs_the_same_modifiers(
    make: Callable[..., ServerCallback], tmp_path: Path
) -> None:
    whole, half = train(make(modifiers=ALL)), train(make(modifiers=ALL), 2)
    path = tmp_path / "half.ckpt"
    half.trainer.save_checkpoint(path)
    assert_alike(train(make(modifiers=ALL[::-1]), ckpt_path=path), whole)
    loaded = Federation.load_from_checkpoint(
        path, client=batchnorm_client(), callback=make(modifiers=ALL)
    )
    assert_equal(loaded, half)
    for others in ([], ALL[:3], (*ALL[:3], TopK(0.4)), (Private("head"), *ALL[1:])):
        callback = make(modifiers=others)
        with pytest.raises(ConfigurationError, match=r"^the checkpoint does not fit .*[^\n]*$"):
            train(callback, ckpt_path=path)
        with pytest.raises(ConfigurationError, match=r"^the checkpoint does not fit .*[^\n]*$"):
            Federation.load_from_checkpoint(path, client=batchnorm_client(), callback=callback)


def test_a_plain_checkpoint_takes_no_modifiers(tmp_path: Path) -> None:
    plain = train(FedAvg(), 2)
    path = tmp_path / "half.ckpt"
    plain.trainer.save_checkpoint(path)
    said = r"made with modifiers none, and here they are Clip\(norm=1.0\)"
    with pytest.raises(ConfigurationError, match=said):
        train(FedAvg(modifiers=[Clip()]), ckpt_path=path)
    assert_alike(train(FedAvg(modifiers=[Clip(None)]), ckpt_path=path), train(FedAvg()))


# Private layers


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("head", HEAD),
        ("body", BODY),
        ("norms", NORMS),
        (["head", "norms"], sorted(HEAD + NORMS)),
        (["norms", "head", "head"], sorted(HEAD + NORMS)),
        ("network.3", HEAD),
        ("network.3.bias", HEAD[:1]),
        ("*bias", ["network.0.bias", "network.1.bias", "network.3.bias"]),
        ("network.[13].bias", ["network.1.bias", "network.3.bias"]),
        (Layers(first=1), ["network.0.bias", "network.0.weight"]),
        (Layers(types=nn.BatchNorm1d), NORMS),
        ([Layers(head=True), "network.0.bias"], ["network.0.bias", *HEAD]),
    ],
)
def test_layers_are_named_in_many_ways(chosen: Any, found: list[str]) -> None:
    assert names(chosen) == found


def test_all_kinds_of_normalisation_are_found() -> None:
    layers = nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.InstanceNorm1d(4, affine=True)
    module = network_client(nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 3)))
    assert {name.split(".")[1] for name in names("norms", module)} == {"1", "2", "3", "4"}


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


@ENGINES
def test_a_tied_weight_is_private_under_either_name(engine: str) -> None:
    module = network_client(Tied())
    assert names("network.second.weight", module) == ["network.first.weight"]
    runs = [
        run(network_client(Tied()), small_data(), FedAvg(modifiers=[Private(by)]), 2, engine=engine)
        for by in ("network.first.weight", "network.second.weight")
    ]
    assert_alike(*runs)
    own = [runs[0].client_state(i)["network.second.weight"] for i in range(2)]
    assert not torch.equal(*own)
    state = runs[0].client_state(0)
    assert torch.equal(state["network.first.weight"], state["network.second.weight"])


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (
            "*lora*",
            r"Private: '\*lora\*' matches none of network.3.bias, network.1.bias, network.0.bias, "
            "network.1.running_var, network.1.running_mean and 4 more",
        ),
        (["head", "nothing"], r"Private: 'nothing' matches none of network"),
        (Layers(types=nn.Conv2d), r"Private: Layers\(.*\) selects no layer with a tensor"),
        (Layers("nothing"), r"Layers: 'nothing' matches none of the 3 layers"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(chosen: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train(FedAvg(modifiers=[Private(chosen)]))


def test_a_network_without_such_layers_is_refused() -> None:
    said = refusal(FedAvg(modifiers=[Private("norms")]), linear_client())
    assert said == "Private: Classifier has no layer that normalises"
    said = refusal(FedAvg(modifiers=[Private("body")]), linear_client())
    assert said == "Private: Classifier has no body"


@pytest.mark.parametrize(
    "callback",
    [
        FedAvg(modifiers=[Private("*")]),
        FedAvg(modifiers=[Private(["head", "body"], keep=False)]),
        FeSEM(2, modifiers=[Private("network")]),
        FedRep(modifiers=[Private(Layers(first=2))]),
        SharedPart(Layers(head=True), modifiers=[Private("body")]),
        FedBABU(modifiers=[Private("body")]),
    ],
)
def test_if_everything_is_private_it_is_said(callback: ServerCallback) -> None:
    said = refusal(callback, local_epochs=2)
    assert said == (
        f"{type(callback).__name__}: nothing is sent, since all parameters that are trained stay "
        "with the clients: take Local"
    )


@pytest.mark.parametrize(
    "callback",
    [
        FedPAC(modifiers=[Private("head")]),
        FedCP(modifiers=[Private("head")]),
        GPFL(modifiers=[Private("head")]),
        FedRoD(modifiers=[Private("head")]),
        PFedFDA(modifiers=[Private("head")]),
        FedBABU(modifiers=[Private("head")]),
        FedAS(modifiers=[Private("head")]),
        FedRep(modifiers=[Private("head")]),
        SharedPart(Layers(head=True), modifiers=[Private("head")]),
        SharedPart(Layers(last=1), modifiers=[Private(["norms", "head"])]),
        FedBABU(head=Layers(last=1), modifiers=[Private("network.3.*")]),
    ],
)
def test_layers_that_a_method_owns_are_refused(callback: ServerCallback) -> None:
    name = type(callback).__name__
    assert refusal(callback, local_epochs=2) == (
        f"{name}: Private can't keep network.3.bias, network.3.weight, which {name} itself keeps "
        "or replaces"
    )


@pytest.mark.parametrize(
    "make",
    [FedPAC, FedCP, GPFL, FedRoD, PFedFDA, FedBABU, FedAS, FedRep],
)
def test_their_norms_may_be_private(make: Callable[..., ServerCallback]) -> None:
    federation = train(make(modifiers=[Private("norms")]), local_epochs=2)
    assert {*NORMS} <= {*federation.callback.private}
    own = [federation.client_state(i)["network.1.running_mean"] for i in range(6)]
    assert len({tuple(value.tolist()) for value in own}) > 2
    shared = federation.callback.shared_parameters
    assert "network.0.weight" in shared
    assert "network.1.weight" not in shared


def test_what_a_method_keeps_already_may_be_named_again() -> None:
    norms = nn.modules.batchnorm._BatchNorm
    for layers in (Layers(types=norms), Layers(first=2)):
        plain = train(SharedPart(layers))
        assert_equal(train(SharedPart(layers, modifiers=[Private("norms")])), plain)


@ENGINES
def test_frozen_layers_are_as_those_of_a_module_that_does_not_train_them(engine: str) -> None:
    client = batchnorm_client()
    client.network[3].requires_grad_(False)
    frozen = train(FedAvg(modifiers=[Frozen("head")]), engine=engine)
    by_hand = run(client, small_data(cohort_size=4), FedAvg(), 3, engine=engine)
    assert_equal(frozen, by_hand)
    assert [e.bytes_up for e in frozen.history] == [e.bytes_up for e in by_hand.history]
    assert {*frozen.layout.frozen} == {*HEAD}


def test_frozen_layers_go_with_private_ones_and_are_the_methods_no_more() -> None:
    federation = train(FeSEM(2, modifiers=[Frozen("norms"), Private("head")]))
    assert federation.algorithm == "FeSEM + frozen norms + private head"
    assert {*federation.callback.shared_parameters} == {"network.0.weight", "network.0.bias"}
    assert refusal(FedRep(modifiers=[Frozen("head")]), local_epochs=2) == (
        "FedRep: Frozen can't take network.3.bias, network.3.weight, which FedRep itself keeps or "
        "replaces"
    )
    assert refusal(FedAvg(modifiers=[Frozen(["head", "body"])])) == (
        "Classifier has no trainable parameter"
    )


ELASTIC = {
    "FedEC": (lambda: FedEC(0.7), lambda: Reptile(modifiers=[Elastic(0.7)])),
    "FedEC-l2": (lambda: FedEC(0.7, "l2"), lambda: Reptile(modifiers=[Elastic(0.7, "l2")])),
    "FedEC-wo": (lambda: FedEC(0.7, None), lambda: Reptile(modifiers=[Elastic(0.7, None)])),
}


@ENGINES
@pytest.mark.parametrize("name", ELASTIC)
def test_fedec_is_reptile_with_an_elastic_term(name: str, engine: str) -> None:
    named, combined = (train(make(), engine=engine) for make in ELASTIC[name])
    assert_equal(named, combined)
    assert [e.bytes_up for e in named.history] == [e.bytes_up for e in combined.history]
    assert named.callback.bytes_kept == combined.callback.bytes_kept
    tuned = [train(make(), engine=engine, finetune_epochs=1) for make in ELASTIC[name]]
    assert_equal(*tuned)


@pytest.mark.parametrize("make", [SCAFFOLD, MOON, FedLC, Ditto, FedRep, FedCP, FedEC, FedPAC])
def test_a_term_of_logits_has_a_memory_beside_that_of_its_method(
    make: Callable[..., ServerCallback],
) -> None:
    one, other = (
        run(
            batchnorm_client().double(),
            small_data(cohort_size=4, dtype=torch.float64),
            make(modifiers=[Elastic(2.0), Proximal(0.1)]),
            3,
            engine=engine,
            local_epochs=2,
        )
        for engine in ("sequential", "vectorized")
    )
    assert other.clients.attached_engine.obstacle is None
    for i in range(6):
        torch.testing.assert_close(one.client_state(i), other.client_state(i), rtol=1e-9, atol=1e-9)
    without = run(
        batchnorm_client().double(),
        small_data(cohort_size=4, dtype=torch.float64),
        make(modifiers=[Proximal(0.1)]),
        3,
        engine="sequential",
        local_epochs=2,
    )
    moved = (
        one.server_states()[0]["network.0.weight"] - without.server_states()[0]["network.0.weight"]
    )
    assert moved.abs().max() > 1e-6


@ENGINES
def test_fednovas_path_knows_of_a_pull(engine: str) -> None:
    """So the modifier is the method's own option, to the bit."""
    data = small_data((3, 20, 9, 14))
    one, other = (
        run(batchnorm_client(), data, callback, 3, engine=engine, local_epochs=2)
        for callback in (FedNova(mu=0.7), FedNova(modifiers=[Proximal(0.7)]))
    )
    assert_equal(one, other)
    said = refusal(FedNova(modifiers=[Proximal(0.7, "eq7")]))
    assert said.startswith("FedNova: the length of a client's path is that of a plain pull")


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (PFedMe(modifiers=[Elastic()]), "one pass of a batch, but MoreauEnvelope makes several"),
        (PerFedAvg(modifiers=[Elastic()]), "one pass of a batch, but Adapted makes several"),
        (APPLE(modifiers=[Elastic()]), "one pass of a batch, but MixedCores makes several"),
        (
            FedSGD(modifiers=[Elastic()]),
            "FedSGD can't be combined with Elastic: its clients take no",
        ),
    ],
)
def test_a_term_of_logits_needs_one_pass(callback: ServerCallback, said: str) -> None:
    assert said in refusal(callback)


def test_fedbabu_owns_the_layers_that_it_is_given() -> None:
    """Its head is what nobody trains, whatever the last layer is."""
    federation = train(FedBABU(head=Layers(first=1), modifiers=[Private("head")]))
    assert {*HEAD} == {*federation.callback.private}
    said = refusal(FedBABU(head=Layers(first=1), modifiers=[Private("network.0.bias")]))
    assert said.startswith("FedBABU: Private can't keep network.0.bias, which FedBABU")


@ENGINES
def test_private_entries_stay_and_do_not_travel(engine: str) -> None:
    plain = train(FeSEM(2), engine=engine)
    federation = train(FeSEM(2, modifiers=[Private("norms")]), engine=engine)
    kept = sum(federation.layout.template[name].nbytes for name in NORMS)
    for one, other in zip(plain.history, federation.history, strict=True):
        assert other.bytes_up == one.bytes_up - kept * len(other.clients)
    assert federation.callback.bytes_kept == plain.callback.bytes_kept + kept
    initial = batchnorm_client().state_dict()
    for state in federation.server_states():
        assert_same({n: state[n] for n in NORMS}, {n: initial[n] for n in NORMS})
    counts = {int(federation.client_state(i)["network.1.num_batches_tracked"]) for i in range(6)}
    assert len(counts) > 2


@pytest.mark.parametrize("buffers", ["shared", "local", "reset"])
def test_buffers_of_private_layers_are_kept_whatever_becomes_of_others(buffers: Any) -> None:
    federation = train(FedAvg(buffers=buffers, modifiers=[Private("norms")]))
    assert {*NORMS} <= {*federation.callback.kept_names}
    assert_alike(federation, train(FedAvg(modifiers=[Private("norms")])))


@ENGINES
def test_entries_that_are_not_kept_start_anew(engine: str) -> None:
    """After any number of rounds a client starts with the initial head."""
    initial = batchnorm_client().state_dict()
    federation = train(FedAvg(modifiers=[Private("head", keep=False)]), engine=engine)
    kept = train(FedAvg(modifiers=[Private("head")]), engine=engine)
    for i in range(6):
        state = federation.client_state(i)
        assert_same({n: state[n] for n in HEAD}, {n: initial[n] for n in HEAD})
    assert federation.callback.bytes_kept == 0
    assert not federation.callback.personalizes
    assert federation.history[0].bytes_up == kept.history[0].bytes_up
    first = [train(FedAvg(modifiers=[Private("head", keep=keep)]), 1) for keep in (True, False)]
    assert_same(*(one.server_states()[0] for one in first))
    left, right = (one.server_states()[0]["network.0.weight"] for one in (federation, kept))
    assert not torch.equal(left, right)


def test_what_partial_sharing_prints_is_what_stays(capsys: pytest.CaptureFixture[str]) -> None:
    train(SharedPart(Layers(head=True), modifiers=[Private("norms")]), 1)
    printed = capsys.readouterr().out
    assert "network.0 " in printed
    assert "network.1, network.3" in printed


# Refusals of methods


def test_a_method_without_a_model_to_send_takes_none() -> None:
    for one in (Private("head"), Proximal(0.1), Clip(), TopK()):
        assert refusal(Local(modifiers=[one])) == (
            f"Local can't be combined with {type(one).__name__}: its server sends no model, so "
            "this would change nothing"
        )
    run(linear_client(), small_data(), Local(modifiers=[Proximal(0), Clip(None)]))


class Step(Modifier):
    """Replaces the step."""

    replaces = "step"


class Momentum(Modifier):
    """As well."""

    replaces = "step"


class Shrink(Transform):
    """A second one that clips."""

    stage = "clip"

    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        return updates / 2


class Careful(FedAvg):
    """Has a reason of its own."""

    refuses: ClassVar[dict[str, str]] = {"term": "it knows better"}


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (
            FedAvg(modifiers=[Step(), Momentum()]),
            "FedAvg: Momentum and Step both replace the training step: take one of them",
        ),
        (
            FeSEM(2, modifiers=[Shrink(), Clip(0.3)]),
            "FeSEM: Clip and Shrink both clip updates: take one of them",
        ),
        (
            Careful(modifiers=[Proximal(0.1)]),
            "Careful can't be combined with Proximal: it knows better",
        ),
    ],
)
def test_what_excludes_each_other_is_refused(callback: ServerCallback, said: str) -> None:
    assert refusal(callback) == said


def test_a_neutral_one_excludes_nothing() -> None:
    run(linear_client(), small_data(), Careful(modifiers=[Proximal(0), Shrink(), Clip(None)]))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("one", [Private("head"), Proximal(0.1)])
def test_fedsgd_says_what_changes_nothing(one: Modifier) -> None:
    with pytest.warns(UserWarning, match=rf"FedSGD \+ {type(one).__name__}"):
        run(dropout_client(), small_data(), FedSGD(modifiers=[one]), engine="sequential")


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_ifca_says_that_own_heads_hold_clients() -> None:
    callback = IFCA(2, modifiers=[Private("head")])
    with pytest.warns(UserWarning, match=r"IFCA \+ private head: .* may never choose another"):
        run(dropout_client(), small_data(), callback, engine="sequential")


# One's own


class Shorter(Term):
    """Pulls parameters to 0."""

    def __init__(self, weight: float = 0.1) -> None:
        self.weight = weight

    def value(self, c: LocalClient) -> Tensor | None:
        parts: Sequence[Tensor] = [c.weights[name].square().sum() for name in c.anchor or ()]
        return self.weight * torch.stack([*parts]).sum() if parts else None


@ENGINES
def test_a_term_of_ones_own(engine: str) -> None:
    """It is weight decay, of the entries that travel, but not in fine-tuning."""

    def plain(weight_decay: float) -> Federation:
        client = linear_client(double=True, optimizer=sgd(0.1, weight_decay=weight_decay))
        return run(client, small_data(dtype=torch.float64), FedAvg(), 2, engine=engine)

    client = linear_client(double=True)
    data = small_data(dtype=torch.float64)
    own = run(client, data, FedAvg(modifiers=[Shorter(0.05)]), 2, engine=engine)
    torch.testing.assert_close(own.server_states()[0], plain(0.1).server_states()[0])
    assert own.callback.name_in_results == "FedAvg + shorter"


@pytest.mark.parametrize(
    ("odd", "said"), [(torch.ones(3), r"shape \[3\]"), (0.5, "0.5"), ("x", "'x'")]
)
def test_a_terms_odd_value_is_said_with_its_name(odd: Any, said: str) -> None:
    class Odd(Term):
        def value(self, c: LocalClient) -> Any:
            return odd

    with pytest.raises(ClientError, match=rf"Odd\.value must return a scalar tensor, got {said}"):
        run(
            linear_client(),
            small_data(),
            FedAvg(modifiers=[Odd()]),
            engine="sequential",
            on_client_error="raise",
        )


class InPlace(Transform):
    """Changes what it is given."""

    stage = "clip"

    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        return updates.mul_(0.5)


class Halved(InPlace):
    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        return updates * 0.5


class Cheap(Halved):
    """Says that it is small, and packs nothing."""

    def nbytes(self, size: int, itemsize: int) -> int:
        return 1


def test_a_transform_may_change_what_it_is_given() -> None:
    one, other = (train(FedAvg(modifiers=[kind()])) for kind in (InPlace, Halved))
    assert_equal(one, other)
    with pytest.raises(AssertionError):
        assert_equal(one, train(FedAvg()))


class Overflowing(Transform):
    """Keeps the first half of an update; for some clients the result is not finite."""

    stage = "compress"
    error_feedback = True

    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        changed = updates.clone()
        changed[:, updates.shape[1] // 2 :] = 0
        return torch.where(draw.uniform()[:, :1] < 0.3, torch.inf, changed)


@pytest.mark.parametrize("returns", ["updates", "gradients"])
def test_a_client_whose_transformed_update_is_not_finite_fails_alone(returns: str) -> None:
    kind = FedAvg if returns == "updates" else FedSGD
    runs = []
    for engine in ("sequential", "vectorized"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.append(train(kind(modifiers=[Overflowing()]), 5, engine=engine))
        assert any("its result is NaN or infinite (" in str(one.message) for one in caught)
    for one in runs:
        failed = [entry.failed for entry in one.history]
        assert any(failed)
        assert all(len(left_out) < 4 for left_out in failed)
        assert any(
            client in entry.clients and client not in entry.failed
            for client in {client for left_out in failed for client in left_out}
            for entry in one.history
        )
        assert all(value.isfinite().all() for value in one.server_states()[0].values())
    one, other = runs
    torch.testing.assert_close(one.server_states(), other.server_states(), rtol=1e-4, atol=1e-5)
    assert [e.bytes_up for e in one.history] == [e.bytes_up for e in other.history]


def test_bytes_are_those_of_what_is_packed() -> None:
    cheap, plain = train(FedAvg(modifiers=[Cheap()])), train(FedAvg())
    assert [e.bytes_up for e in cheap.history] == [e.bytes_up for e in plain.history]


class Odd(Halved):
    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        return updates[:, :1]


class Stageless(Transform):
    """Does not say when it runs."""


class Idle(Modifier):
    """Is neither a term nor a transform."""


class Looking(Term):
    """Looks at logits without a word."""

    def value(self, c: Any) -> Tensor:
        return c.logits.square().mean()


def test_what_an_own_modifier_lacks_is_said() -> None:
    assert refusal(FedAvg(modifiers=[Stageless()])).startswith("Stageless: stage must be one of")
    assert refusal(FedAvg(modifiers=[Idle()])).startswith("FedAvg: Idle would change nothing")
    assert "Odd must return updates of the shape" in refusal(FedAvg(modifiers=[Odd()]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError):
            train(FedAvg(modifiers=[Looking()]))
    assert any("has to set needs_logits" in str(one.message) for one in caught)


class Labelled(Term):
    """A term of logits and labels: the mean margin of the right class."""

    @property
    def needs_logits(self) -> bool:
        return True

    def value(self, c: Any) -> Tensor:
        right = (c.logits * c.classes(c.batch)).sum(1)
        return 0.1 * c.mean(c.logits.logsumexp(1) - right)


def test_a_term_may_look_at_labels() -> None:
    """Here it is a tenth of the loss itself."""
    one, other = (
        run(
            batchnorm_client().double(),
            small_data(cohort_size=4, dtype=torch.float64),
            FedAvg(modifiers=[Labelled()]),
            2,
            engine=engine,
        )
        for engine in ("sequential", "vectorized")
    )
    assert other.clients.attached_engine.obstacle is None
    torch.testing.assert_close(one.server_states(), other.server_states(), rtol=1e-9, atol=1e-9)


def test_a_modifier_among_the_callbacks_is_named() -> None:
    trainer = quiet_trainer(1, FedAvg(), Private("head"))
    with pytest.raises(ConfigurationError, match="Private is no callback of the Trainer"):
        trainer.fit(Federation(batchnorm_client()), datamodule=small_data())


def test_a_value_that_is_noted_twice_in_a_step_is_logged_as_its_mean() -> None:
    """The client method and the modifier note their constraints under one name."""
    alone, stacked = (
        run(
            batchnorm_client(ElasticClient),
            small_data(cohort_size=4),
            Reptile(modifiers=[Elastic(0.5, "l2")]),
            3,
            engine=engine,
        )
        for engine in ("sequential", "vectorized")
    )
    one, other = (run.history[-1].metrics[CONSTRAINT] for run in (alone, stacked))
    assert one == pytest.approx(other, rel=1e-4)
