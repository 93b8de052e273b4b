from __future__ import annotations

import io

import matplotlib.colors
import numpy as np
import pytest
import torch

from pflight.datamodules import ClassesPerClient, Digits, TensorClients


def digits(**options) -> Digits:
    data = Digits(**options)
    data.setup()
    return data


def test_the_summary_counts_clients_samples_and_classes():
    x = torch.zeros(10, 2)
    y = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 2, 2])
    data = TensorClients(
        [(x[:4], y[:4]), (x[4:6], y[4:6]), (x[6:9], y[6:9])],
        test=[(x[:1], y[:1]), (x[:0], y[:0]), (x[9:], y[9:])],
        num_classes=5,
        holdout_clients=1 / 3,
    )
    title, *rows = data.summary().splitlines()
    assert title == "TensorClients: 3 clients, 5 classes, 1 clients held out as newcomers"
    assert [row.split() for row in rows] == [
        ["clients", "samples", "min", "median", "max"],
        ["train", "3", "9", "2", "3", "4"],
        ["val", "0", "0", "0", "0", "0"],
        ["test", "2", "2", "0", "1", "1"],
        ["all", "3", "11", "2", "4", "5"],
        ["classes", "1", "2", "3"],
    ]


def test_the_summary_of_data_without_classes():
    data = TensorClients([(torch.zeros(2, 2), torch.zeros(2, 1))] * 3)
    title, *rows = data.summary().splitlines()
    assert title == "TensorClients: 3 clients"
    assert [row.split()[0] for row in rows] == ["clients", "train", "val", "test", "all"]


def test_the_summary_names_the_partition():
    assert "ClassesPerClient(k=2" in digits().summary()


def test_the_figure_stacks_each_clients_classes():
    data = digits(num_clients=6, partition=ClassesPerClient(3), holdout_clients=0.3)
    axes = data.partition_figure().axes[0]
    counts = sum(data.class_counts(split) for split in ("train", "val", "test")).numpy()
    drawn = np.zeros((6, 10))
    for kind, bars in enumerate(axes.containers):
        for bar in bars:
            drawn[round(bar.get_x() + bar.get_width() / 2), kind] = bar.get_height()
    assert np.array_equal(drawn, counts)
    pale = {
        round(bar.get_x() + 0.4)
        for bars in axes.containers
        for bar in bars
        if matplotlib.colors.to_rgba(bar.get_facecolor())[3] < 1
    }
    assert pale == set(data.new_clients.tolist())


@pytest.mark.short("70-*", "3-*")
@pytest.mark.parametrize(
    ("num_clients", "num_classes", "bars", "label"),
    [
        (70, 2, 70, "70 clients, sorted"),
        (1500, 62, 200, "200 of 1,500 clients"),
        (3, 1, 3, "client"),
    ],
)
def test_the_figure_stays_readable(num_clients, num_classes, bars, label):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(num_classes, (num_clients, 8), generator=generator)
    x = torch.zeros(num_clients, 8, 1)
    data = TensorClients(list(zip(x, y, strict=True)), num_classes=num_classes)
    figure = data.partition_figure()
    axes = figure.axes[0]
    assert label in axes.get_xlabel()
    assert len(axes.containers) == min(num_classes, 10)
    places = {bar.get_x() for group in axes.containers for bar in group}
    assert len(places) == bars
    figure.savefig(io.BytesIO(), dpi=40)
