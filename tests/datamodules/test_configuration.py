"""Every data module and partition works from the command line and from a config file."""

from __future__ import annotations

from typing import Any

import pytest
from jsonargparse import ArgumentParser, Namespace

from pflight import datamodules
from pflight.datamodules import (
    IID,
    ByUser,
    Centralized,
    ClassesPerClient,
    Digits,
    Dirichlet,
    DominantClasses,
    FashionMNIST,
    FederatedDataModule,
    Omniglot,
)


def parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments((FederatedDataModule, Centralized), "data")
    return parser


def built(config: Namespace) -> Any:
    """Make the data module; ``instantiate`` is the newer name."""
    made = parser()
    instantiate = getattr(made, "instantiate", None) or made.instantiate_classes
    return instantiate(config).data


@pytest.mark.parametrize("name", ["Digits", "FashionMNIST", "Omniglot"])
def test_a_config_comes_back_as_it_was_printed(name):
    config = parser().parse_args([f"--data={name}", "--data.cohort_size=5"])
    text = parser().dump(config)
    again = parser().parse_string(text)
    assert parser().dump(again) == text
    assert "class_path: pflight.datamodules." in text
    data = built(again)
    assert type(data) is getattr(datamodules, name)
    assert data.cohort_size == 5
    assert data.partition == type(data)().partition


@pytest.mark.short("Digits-*")
@pytest.mark.parametrize(
    ("arguments", "partition"),
    [
        (["IID"], IID()),
        (["Dirichlet", "alpha=0.1", "too_few=move"], Dirichlet(0.1, too_few="move")),
        (["ClassesPerClient", "k=3"], ClassesPerClient(3)),
        (["DominantClasses", "share=0.5"], DominantClasses(2, 0.5)),
        (["ByUser"], ByUser()),
    ],
)
@pytest.mark.parametrize("data", [Digits, FashionMNIST, Omniglot])
def test_partitions_are_chosen_by_their_short_names(data, arguments, partition):
    kind, *options = arguments
    command = [f"--data={data.__name__}", f"--data.partition={kind}"]
    config = parser().parse_args(command + [f"--data.partition.{option}" for option in options])
    assert built(config).partition == partition
    assert parser().parse_string(parser().dump(config)) == config


def test_former_names_of_classes_are_known():
    wrapped = ["--data.data=Digits", "--data.data.partition=pflight.datamodules.Natural"]
    config = parser().parse_args(["--data=pflight.datamodules.HiddenGroups", *wrapped])
    data = built(config)
    assert type(data) is datamodules.KnownClusters
    assert data.data.partition == ByUser()


def test_centralized_data_come_from_a_config():
    config = parser().parse_args(
        ["--data=Centralized", "--data.data=Digits", "--data.data.partition=IID"]
    )
    data = built(config)
    assert isinstance(data, Centralized)
    assert data.data.partition == IID()
    assert data.num_classes == 10


def test_every_argument_has_its_help(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--data.help=Omniglot"])
    text = " ".join(capsys.readouterr().out.split())
    for phrase in ("Folder with the image archives", "Share of each client's samples for testing",
                   "Probability that a sampled client does not answer"):  # fmt: skip
        assert phrase in text
    assert "num_classes" not in text
