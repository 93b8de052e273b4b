"""Five nodes over TLS, each a process of its own, give the simulated run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.deploy.machines import Machines, history

METHODS = {
    "FedAvg": "{class_path: FedAvg}",
    "FeSEM": "{class_path: FeSEM, init_args: {num_clusters: 2, mu: 0.1}}",
    "FedEC": "{class_path: FedEC}",
    "Ditto": "{class_path: Ditto}",
    "pFedLA": "{class_path: PFedLA, init_args: {lr: 0.5}}",
    "SCAFFOLD": "{class_path: SCAFFOLD}",
}
NODES = 5


@pytest.mark.parametrize(
    "name", ["FedAvg", *(pytest.param(name, marks=pytest.mark.long) for name in [*METHODS][1:])]
)
def test_five_nodes_over_tls_are_the_simulation(name: str, tmp_path: Path) -> None:
    """Weights, what clients are judged by, who took part, and what travelled."""
    machines = Machines(tmp_path, METHODS[name], NODES)
    judged_once = "--trainer.check_val_every_n_epoch=5"
    try:
        for client in range(NODES):
            machines.node(client)
        machines.server("run", judged_once)
        simulated = machines.simulate(judged_once)
        assert machines.ended("server") == 0, machines.said("server")
    finally:
        machines.stop()
    deployed = torch.load(machines.last("run"), weights_only=True)
    one, other = deployed["state_dict"], simulated["state_dict"]
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    rounds = history(machines.last("run"))
    assert [entry.failed for entry in rounds] == [[]] * 5
    for here, there in zip(history(machines.last("simulated")), rounds, strict=True):
        assert (here.clients, here.bytes_down, here.bytes_up) == (
            there.clients,
            there.bytes_down,
            there.bytes_up,
        )
        assert here.metrics == pytest.approx(there.metrics, abs=1e-5, nan_ok=True)
    (line,) = re.findall(
        r"(\d+) messages to train carried .* around the tensors", machines.said("server")
    )
    assert int(line) == sum(len(entry.clients) for entry in rounds)
