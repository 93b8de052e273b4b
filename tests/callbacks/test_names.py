"""What algorithms are called that share a server callback, beyond those of the configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

import pflight
from pflight import Federation
from pflight.callbacks import (
    CFL,
    IFCA,
    Ditto,
    FedAvg,
    FedEC,
    FedProx,
    FeSEM,
    Local,
    PFedLA,
    Reptile,
    ServerCallback,
    SharedPart,
    TrimmedKMeans,
)
from pflight.errors import ConfigurationError
from pflight.models import Classifier, ElasticClient, ProximalClient
from pflight.optim import Yogi
from pflight.states.layers import Layers
from tests.runs import dropout_client, linear_client, run, small_data


class Mine(FedAvg):
    """A user's own."""


def elastic(constraint: str | None) -> Classifier:
    return linear_client(ElasticClient, constraint=constraint)


NAMES: list[tuple[str, Classifier, ServerCallback, dict[str, Any]]] = [
    ("FedAvg", linear_client(), FedAvg("uniform"), {}),
    ("Ditto", linear_client(), Ditto(), {}),
    ("FedAvg + fine-tuning", linear_client(), FedAvg(), {"finetune_epochs": 1}),
    ("Local", linear_client(), Local(), {"finetune_epochs": 1}),
    ("FedProx", linear_client(ProximalClient), FedAvg(), {}),
    ("FedProx", linear_client(), FedProx(), {}),
    ("FedProx + FedAdam", linear_client(), FedProx(), {"server_optimizer": torch.optim.Adam}),
    ("FedAdam", linear_client(), FedAvg(), {"server_optimizer": torch.optim.Adam}),
    ("FedYogi", linear_client(), FedAvg(), {"server_optimizer": Yogi}),
    (
        "FedProx + FedAvgM",
        linear_client(ProximalClient),
        FedAvg(),
        {"server_optimizer": partial(torch.optim.SGD, lr=1.0, momentum=0.9)},
    ),
    ("Mine", linear_client(ProximalClient), Mine(), {}),
    ("FedEC", elastic("kl"), Reptile(lr=0.6), {"finetune_epochs": 1}),
    ("FedEC-l2", elastic("l2"), Reptile(), {}),
    ("FedEC-wo", elastic(None), Reptile(), {}),
    ("FedEC-wo", elastic(None), FedEC(), {}),
    ("FedEC", linear_client(), FedEC(lr=0.6), {}),
    ("FedEC-l2", linear_client(), FedEC(constraint="l2"), {}),
    ("FedDist", linear_client(), Reptile(lr=0.6), {}),
    ("FedDWS", linear_client(), Reptile("samples", 0.6), {}),
    ("Reptile", linear_client(), Reptile(lr=0.6, decay="linear"), {}),
    ("FeSEM", linear_client(ProximalClient), FeSEM(2), {}),
    ("FeSEM-MA (K chosen)", linear_client(), FeSEM("auto", matching="bbp_map"), {}),
    ("IFCA", linear_client(), IFCA(2), {}),
    ("HeurpFedLA(1)", linear_client(), PFedLA(retain=1), {}),
    ("SharedPart", dropout_client(), SharedPart(Layers(names="network.0*")), {}),
]


@pytest.mark.parametrize(("name", "client", "callback", "options"), NAMES)
def test_the_field_has_a_name_for_it(
    name: str, client: Classifier, callback: ServerCallback, options: dict[str, Any]
) -> None:
    rounds = 0 if name.endswith("chosen)") else 1
    assert run(client, small_data(), callback, rounds, **options).algorithm == name


def test_before_it_is_set_up_it_has_none() -> None:
    with pytest.raises(ConfigurationError, match="no server yet"):
        _ = Federation(linear_client()).algorithm


@pytest.mark.parametrize(
    ("former", "options", "kind"),
    [
        ("FedCluster", [], CFL),
        ("HypoCluster", ["num_clusters=2"], IFCA),
        ("Robust", ["num_clusters=2"], TrimmedKMeans),
    ],
)
def test_former_names_of_classes_are_known(former: str, options: list[str], kind: type) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ServerCallback, "server")
    given = [f"--server.{option}" for option in options]
    config = parser.parse_args([f"--server=pflight.callbacks.{former}", *given])
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    assert type(instantiate(config).server) is kind


def test_the_former_name_of_the_classifier_is_known() -> None:
    assert pflight.models.ClientModule is Classifier
