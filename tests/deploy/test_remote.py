"""A federation whose clients are on machines of their own is the one that was simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from pflight import Federation
from pflight.callbacks import IFCA, Ditto, FedAvg, FedFomo, FeSEM, ServerCallback
from pflight.data.loaders import Split
from pflight.datamodules import FederatedDataModule
from pflight.deploy.remote import Asked
from pflight.errors import ConfigurationError
from pflight.local_client import Batches, LocalClient, LocalWork, Pass
from pflight.method import ClientMethod
from tests.algorithm_tester import ALGORITHMS, of_each_kind
from tests.deploy.in_process import Deployed
from tests.runs import (
    CLASSES,
    batchnorm_client,
    linear_client,
    quiet_trainer,
    run,
    samples,
    small_data,
)
from tests.test_any_method import Diabetes, lazy

REFUSED = {  # what needs to see what clients don't show, and what is said
    "FeSEM-auto": "the train samples of client 0 are on its own machine",
    "FeSEM-MA": "matching, .* can't count them: .* stays with its node",
}


def assert_same_run(here: Federation, there: Federation) -> None:
    for left, right in zip(here.server_states(), there.server_states(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    for one, other in zip(here.history, there.history, strict=True):
        assert (one.clients, one.failed) == (other.clients, other.failed)
        assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)
        assert one.metrics == pytest.approx(other.metrics, abs=1e-6, nan_ok=True)


@pytest.mark.short("FedAvg", "FeSEM", "Ditto", "SCAFFOLD", "pFedLA")
@pytest.mark.parametrize("name", of_each_kind(name for name in ALGORITHMS if name not in REFUSED))
def test_deployed_is_simulated(name: str, tmp_path: Path) -> None:
    algorithm = ALGORITHMS[name]
    data = small_data((5, 12, 7, 9), cohort_size=3)
    make = partial(batchnorm_client, algorithm.client)
    here = run(make(), data, algorithm.callback(), 3, engine="sequential")
    there = Deployed(make, data, algorithm.callback, tmp_path).server(3)
    assert_same_run(here, there)


class Sorted(FederatedDataModule):
    """Data with an order and an augmentation of their own."""

    num_clients = 3

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        return samples(6 + client, client)

    def order(self, client: int, round: int, epoch: int = 0) -> Tensor:
        return self.samples(client, "train")[0][:, 0].argsort()

    def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
        return x + client + round


@pytest.mark.short("FedAvg")
@pytest.mark.parametrize("callback", [FedAvg, FedFomo])
def test_what_the_data_define_counts_at_nodes(
    callback: type[ServerCallback], tmp_path: Path
) -> None:
    data = Sorted(num_classes=CLASSES, batch_size=4)
    here = run(linear_client(), data, callback(), 2, engine="sequential")
    there = Deployed(linear_client, data, callback, tmp_path).server(2)
    assert_same_run(here, there)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_clients_labels_is_refused(name: str, tmp_path: Path) -> None:
    deployed = Deployed(batchnorm_client, small_data(), ALGORITHMS[name].callback, tmp_path)
    with pytest.raises(ConfigurationError, match=REFUSED[name]) as error:
        deployed.server(1)
    assert "\n" not in str(error.value)


class Largest(Pass):
    """The largest loss of a client's batches."""

    batch_size = 2

    def __call__(self, c: LocalClient, batches: Batches) -> dict[str, Tensor]:
        return {"z": torch.stack([c.task_loss(batch) for batch in batches]).max()}


class Asking(FedAvg):
    """A server that wants to look through its clients' samples by itself."""

    def setup_server(self) -> None:
        super().setup_server()
        clients = torch.arange(2)
        self.clients.run(Largest(), clients, self.broadcast(clients))


class Scaling(ClientMethod):
    """Clients that divide their model by their largest loss."""

    def finish(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> TensorDict:
        for row, found in enumerate(work.run(Largest(), clients, trained)):
            assert found is not None
            trained["network.weight"][row] /= found["z"]
        return trained


class Scaled(FedAvg):
    client_method = Scaling()


def test_a_server_gets_no_pass_run_on_other_machines(tmp_path: Path) -> None:
    """The machines would tell what is in their samples."""
    deployed = Deployed(linear_client, small_data(), Asking, tmp_path)
    with pytest.raises(ConfigurationError, match="Largest: the server can't look") as error:
        deployed.server(1)
    assert "\n" not in str(error.value)


def test_clients_on_other_machines_run_passes_of_their_method(tmp_path: Path) -> None:
    here = run(linear_client(), small_data(), Scaled(), 2, engine="sequential")
    assert_same_run(here, Deployed(linear_client, small_data(), Scaled, tmp_path).server(2))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Lightning, as it loads
def test_any_module_on_any_data(tmp_path: Path) -> None:
    """A user's own module, judged by what it logs, on samples that are read one by one."""
    here = Federation(Diabetes(), engine="sequential")
    quiet_trainer(2, Ditto()).fit(here, datamodule=lazy())
    there = Deployed(Diabetes, lazy(), Ditto, tmp_path).server(2)
    left, right = here.server_states()[0], there.server_states()[0]
    torch.testing.assert_close(left, right, rtol=0, atol=0)
    known = {n: v for n, v in here.history[-1].metrics.items() if "pooled" not in n}
    assert there.history[-1].metrics == pytest.approx(known, abs=1e-6)  # states stay at the nodes
    assert "val/worst_decile_mae" in there.history[-1].metrics


class Undefined(Diabetes):
    """Logs what is not always a number, and nothing to be judged by."""

    validation_step = L.LightningModule.validation_step

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("train/ratio", torch.tensor(float("nan")))
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_may_log_what_is_no_number(tmp_path: Path) -> None:
    (entry,) = Deployed(Undefined, lazy(), FedAvg, tmp_path).server(1).history
    assert entry.failed == []
    assert entry.metrics["train/mse"] > 0
    assert "train/ratio" not in entry.metrics


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_test_is_the_simulated_one_and_predictions_stay(tmp_path: Path) -> None:
    data = small_data((5, 12, 7, 9))
    here = run(batchnorm_client(), data, Ditto(), 2, engine="sequential")
    deployed = Deployed(batchnorm_client, data, Ditto, tmp_path)
    there = deployed.server(2)
    (one,) = here.trainer.test(here, datamodule=data, verbose=False)
    (other,) = there.trainer.test(there, datamodule=deployed.known, verbose=False)
    assert one == pytest.approx(other, abs=1e-6, nan_ok=True)
    assert "test/server/macro_acc" in one
    with pytest.raises(ConfigurationError, match="client 0 is on its own machine"):
        there.trainer.predict(there, datamodule=deployed.known)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_deployed_run_can_be_loaded_anywhere(tmp_path: Path) -> None:
    deployed = Deployed(batchnorm_client, small_data(), Ditto, tmp_path)
    there = deployed.server(2)
    there.trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = Federation.load_from_checkpoint(
        tmp_path / "run.ckpt", client=batchnorm_client(), callback=Ditto()
    )
    torch.testing.assert_close(loaded.server_states(), there.server_states(), rtol=0, atol=0)
    assert loaded.history == there.history


@pytest.mark.short("FedAvg", "Ditto")
@pytest.mark.parametrize("name", ["FedAvg", "FeSEM", "FedEC", "Ditto", "pFedLA", "SCAFFOLD"])
def test_traffic_is_what_messages_carry(name: str, tmp_path: Path) -> None:
    """To the byte, but for what is around the tensors: names, shapes and numbers."""
    deployed = Deployed(batchnorm_client, small_data(), ALGORITHMS[name].callback, tmp_path)
    history = deployed.server(2).history
    counted = [sum(entry.bytes_down for entry in history), sum(entry.bytes_up for entry in history)]
    assert counted == [sum(sizes) for sizes in zip(*deployed.post.tensors["train"], strict=True)]
    carried = [sum(sizes) for sizes in zip(*deployed.post.carried["train"], strict=True)]
    around = 3_000 * sum(len(entry.clients) for entry in history)
    for less, more in zip(counted, carried, strict=True):
        assert less < more <= less + around


@pytest.mark.long
def test_a_client_of_ifca_gets_all_models_in_one_message(tmp_path: Path) -> None:
    data = small_data()
    deployed = Deployed(batchnorm_client, data, partial(IFCA, 3, group_rounds=1), tmp_path)
    history = deployed.server(3).history
    trained = sum(len(entry.clients) for entry in history[1:])
    judged = len(history) * data.num_clients
    assert len(deployed.post.carried["losses"]) == trained + judged


@pytest.mark.short("FedAvg-1")
@pytest.mark.parametrize(("callback", "models"), [(FedAvg, 1), (partial(FeSEM, 2), 2)])
def test_a_model_for_many_clients_is_held_once(
    callback: Callable[[], ServerCallback], models: int, tmp_path: Path
) -> None:
    """So that messages to many nodes take the memory of the server's models."""
    deployed = Deployed(batchnorm_client, small_data(), callback, tmp_path)
    send, held = deployed.post.send, list[int]()

    def note(messages: Iterable[Asked]) -> None:
        messages = [*messages]
        if messages[0].work == "train":
            held.append(len({id(asked.content["sent"]["bytes"].data) for asked in messages}))
        send(messages)

    deployed.post.send = note  # type: ignore[method-assign]
    deployed.server(3)
    assert held[-1] == models
