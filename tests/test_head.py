"""Features and heads: who names the head, what is added beside it, and passes over samples."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import MOON, FedAvg, FedBABU, FedRep, KNNPer, SharedPart
from pflight.datamodules import DatasetClients, TensorClients
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod
from pflight.models import Classifier
from pflight.states.head import EXTRA, Head, head_of, trace
from pflight.states.layers import Layers
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    assert_same,
    batchnorm_client,
    linear_client,
    network_client,
    quiet_trainer,
    run,
    samples,
    sgd,
    small_data,
)


class Backwards(nn.Module):
    """A network whose layers are not in the order in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, CLASSES)
        self.first = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).relu())


class Named(Backwards):
    head = "first"


class TestWhichItIs:
    def test_it_is_the_last_linear_layer(self) -> None:
        assert head_of(batchnorm_client()) == Head("network.3", 6, CLASSES)

    def test_a_network_names_it(self) -> None:
        assert head_of(network_client(Named())) == Head("network.first", FEATURES, 5)

    def test_the_client_module_names_it(self) -> None:
        module = batchnorm_client()
        for name in ("network.0", "0"):
            module.head = name
            assert head_of(module).name == "network.0"
        module.head = "fc"
        with pytest.raises(ConfigurationError, match="'fc' as its head, but has no such module"):
            head_of(module)

    def test_a_forward_pass_tells_the_last_that_is_called(self) -> None:
        network, x = Backwards(), torch.zeros(2, FEATURES)
        assert head_of(network).name == "first"
        assert trace(network, lambda: network(x)) == Head("out", 5, CLASSES)
        callback = SharedPart(Layers(head=True))
        run(network_client(network), small_data(), callback)
        assert callback.private == ("network.out.weight", "network.out.bias")
        callback = FedRep()
        run(network_client(network), small_data(), callback, local_epochs=2)
        assert callback.private == ("network.out.weight", "network.out.bias")

    def test_a_module_without_one_is_refused_in_a_line(self) -> None:
        with pytest.raises(ConfigurationError) as error:
            run(network_client(nn.Conv1d(1, 1, 1)), small_data(), FedAvg_of(Biased()))
        assert str(error.value).startswith("Classifier has no linear layer that could be its head")
        assert "\n" not in str(error.value)

    def test_the_users_module_is_left_alone(self) -> None:
        client = batchnorm_client()
        before, names = {**vars(client)}, [*client.state_dict()]
        run(client, small_data(), FedAvg_of(Biased()))
        assert vars(client) == before
        assert [*client.state_dict()] == names


class Bias(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("sizes", torch.zeros(width))

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        return head(z + self.bias)


class Biased(ClientMethod):
    """Trains a bias on the features, and tells their sums over all samples."""

    needs_head = True

    def __init__(self, lr: float | None = None) -> None:
        self.lr = lr

    @property
    def extra_options(self) -> dict[str, Any]:
        return {} if self.lr is None else {"lr": self.lr, "momentum": 0.0}

    def extra(self, module: L.LightningModule, head: Head) -> nn.Module:
        return Bias(head.width)

    def finish(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> TensorDict:
        like = {"z": trained[f"{EXTRA}.sizes"][0]}
        return trained.update({f"{EXTRA}.sizes": work.sums(clients, trained, sizes, like)["z"]})


def sizes(c: LocalClient, batch: Any) -> dict[str, Tensor]:
    return {"z": c.batch_sum(c.task_loss_and_features(batch)[1].square())}


def FedAvg_of(client_method: ClientMethod) -> FedAvg:  # noqa: N802
    callback = FedAvg("uniform")
    callback.client_method = client_method
    return callback


class Watched(FedAvg):
    """Keeps what it receives."""

    client_method = Biased()

    def receive(self, updates: Any) -> None:
        super().receive(updates)
        for row, client in enumerate(updates.clients.tolist()):
            self.got[client] = {n: t[row].clone() for n, t in updates.states.items()}

    got: dict[int, dict[str, Tensor]]


def network(**options: Any) -> Classifier:
    layers = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)
    return network_client(nn.Sequential(*layers), **options).double()


class TestAnExtraModule:
    @ENGINES
    @pytest.mark.parametrize("eval_batch_size", [None, 3])
    def test_it_trains_predicts_and_travels(self, engine: str, eval_batch_size: int | None) -> None:
        data = small_data(dtype=torch.float64, eval_batch_size=eval_batch_size)
        callback = Watched()
        callback.got = {}
        client = network()
        federation = run(client, data, callback, engine=engine)
        assert federation.clients.attached_engine.chunk == 1 or not (
            federation.clients.attached_engine.obstacle
        )
        for i, state in callback.got.items():
            own = copy.deepcopy(client.network).eval()
            own.load_state_dict({n.removeprefix("network."): state[n] for n in client.state_dict()})
            z = own[:-1](data.samples(i, "train")[0])
            torch.testing.assert_close(state[f"{EXTRA}.sizes"], z.square().sum(0).detach())
            assert state[f"{EXTRA}.bias"].abs().min() > 0
        server = federation.server_states()[0]
        assert server.keys() == client.state_dict().keys()
        module, x = federation.client_module(0), data.samples(0, "test")[0]
        mean = torch.stack([state[f"{EXTRA}.bias"] for state in callback.got.values()])
        mean = (mean * data.num_samples().double().unsqueeze(1)).sum(0) / data.num_samples().sum()
        plain = copy.deepcopy(client).eval()
        plain.load_state_dict(server)
        expected = plain.network[-1](plain.network[:-1](x) + mean)
        torch.testing.assert_close(module(x), expected)
        predictions = quiet_trainer().predict(federation, datamodule=data)
        torch.testing.assert_close(predictions[0].outputs[: len(x)], expected.detach())
        assert pickle.dumps(module)

    @pytest.mark.short("sequential")
    @ENGINES
    def test_the_optimizer_has_options_for_it(self, engine: str) -> None:
        def biases(lr: float | None, **options: float) -> Tensor:
            client = network(optimizer=sgd(0.1, **options))
            data = small_data(dtype=torch.float64)
            federation = run(client, data, FedAvg_of(Biased(lr)), engine=engine)
            return federation.server.tensors(0)[f"{EXTRA}.bias"].detach()

        assert biases(0.0).abs().max() == 0
        assert biases(0.1).equal(biases(None))
        assert not biases(0.1, momentum=0.9).equal(biases(None, momentum=0.9))

    def test_it_resumes_and_is_loaded(self, tmp_path: Any) -> None:
        federation = run(network(), small_data(dtype=torch.float64), FedAvg_of(Biased()), 2)
        federation.trainer.save_checkpoint(tmp_path / "run.ckpt")
        loaded = Federation.load_from_checkpoint(
            tmp_path / "run.ckpt", client=network(), callback=FedAvg_of(Biased())
        )
        assert_same(dict(loaded.server.tensors(0)), dict(federation.server.tensors(0)))


class Own(L.LightningModule):
    """A module that knows nothing of pflight, nor of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 6)
        self.out = nn.Linear(6, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.out(self.body(x).tanh()), y)
        self.log("train/ce", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/ce", F.cross_entropy(self.out(self.body(x).tanh()), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.body.parameters(), *self.out.parameters()], lr=0.1)


def test_any_module_has_one() -> None:
    """Its optimizer does not know of what is added, and steps it all the same."""
    torch.manual_seed(0)
    pairs = [torch.utils.data.TensorDataset(*samples(count, count)) for count in (5, 9, 7)]
    data = DatasetClients(pairs, val=pairs, batch_size=4)
    federation = Federation(Own())
    quiet_trainer(2, FedAvg_of(Biased())).fit(federation, datamodule=data)
    state = federation.server.tensors(0)
    assert state[f"{EXTRA}.bias"].abs().min() > 0
    assert state[f"{EXTRA}.sizes"].min() > 0
    assert federation.history[-1].metrics["val/ce"] > 0


class Corrupt(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise OSError("corrupt file")


@pytest.mark.filterwarnings("ignore:.*client 0 failed:UserWarning")
def test_a_first_client_that_fails_does_not_hide_it() -> None:
    pair = torch.utils.data.TensorDataset(*samples(5, 5))
    federation = Federation(network_client(Backwards()))
    trainer = quiet_trainer(1, FedRep())
    trainer.fit(federation, datamodule=DatasetClients([Corrupt(), pair], batch_size=4))
    assert head_of(federation.client).name == "network.out"


def everything(c: LocalClient, batch: Any) -> dict[str, Tensor]:
    """Return what every method of a client gives, as sums over the samples of a batch."""
    count = torch.tensor(len(batch[1]), dtype=torch.double)
    loss, logits = c.task_loss_and_logits(batch)
    _, features, outputs = c.task_loss_and_features(batch)
    return {
        "count": count,
        "task_loss": c.task_loss(batch) * count,
        "task_loss_at": c.task_loss_at(dict(c.weights), batch) * count,
        "task_loss_and_logits": loss * count,
        "losses": c.losses(outputs, batch) * count,
        "mean": c.mean(logits) * count,
        "batch_mean": c.batch_mean(features) * count,
        "batch_sum": c.batch_sum(features),
        "classes": c.classes(batch).sum(0),
        "labels": c.labels(batch).sum(),
    }


@ENGINES
@pytest.mark.parametrize("eval_batch_size", [None, 4])
def test_sums_count_no_sample_twice(engine: str, eval_batch_size: int | None) -> None:
    """Also of clients of unequal size, whatever a function makes of a batch."""
    found: list[TensorDict] = []

    class Looking(ClientMethod):
        def finish(
            self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
        ) -> TensorDict:
            zero, width = torch.zeros((), dtype=torch.double), torch.zeros(6, dtype=torch.double)
            losses = "task_loss", "task_loss_at", "task_loss_and_logits", "losses"
            like = dict.fromkeys(["count", *losses, "mean", "labels"], zero)
            like |= {"batch_mean": width, "batch_sum": width, "classes": width[:CLASSES]}
            found.append(work.sums(clients, starts, everything, like))
            return trained

    train = [samples(count, count, dtype=torch.double) for count in (20, 5, 13)]
    data = TensorClients(train, num_classes=CLASSES, batch_size=4, eval_batch_size=eval_batch_size)
    module = batchnorm_client().double()
    run(module, data, FedAvg_of(Looking()), 1, engine=engine)
    (sums,) = found
    network = module.network.eval()
    for row, (x, y) in enumerate(train):
        with torch.no_grad():
            features = network[:3](x)
            logits = network[3](features)
            loss = F.cross_entropy(logits, y, reduction="sum")
        right = {
            "count": torch.tensor(len(y)).double(),
            **dict.fromkeys(["task_loss", "task_loss_at", "task_loss_and_logits", "losses"], loss),
            "mean": logits.sum(),
            "batch_mean": features.sum(0),
            "batch_sum": features.sum(0),
            "classes": y.bincount(minlength=CLASSES).double(),
            "labels": y.sum().double(),
        }
        for name, value in right.items():
            torch.testing.assert_close(sums[name][row], value, msg=name)


@ENGINES
@pytest.mark.filterwarnings("ignore:.*client 3 failed:UserWarning")
def test_a_client_whose_pass_fails_is_left_out(engine: str) -> None:
    def fails(c: LocalClient, batch: Any) -> dict[str, Tensor]:
        found = sizes(c, batch)
        bad = c.num_samples == 9
        return {"z": found["z"] / (1 - bad.to(found["z"].dtype))}

    class Failing(Biased):
        def finish(self, work: LocalWork, clients: Tensor, *states: TensorDict) -> TensorDict:
            trained = states[1]
            like = {"z": trained[f"{EXTRA}.sizes"][0]}
            return trained.update({f"{EXTRA}.sizes": work.sums(clients, trained, fails, like)["z"]})

    federation = run(linear_client(double=True), small_data(dtype=torch.float64),
                     FedAvg_of(Failing()), 2, engine=engine)  # fmt: skip
    assert [entry.failed for entry in federation.history] == [[3], [3]]
    assert all(t.isfinite().all() for t in federation.server.tensors(0).values())


class Language(L.LightningModule):
    """Predicts the next of seven words by its embedding, with or without a layer for it."""

    def __init__(self, ties: bool) -> None:
        super().__init__()
        self.words, self.inner, self.norm = nn.Embedding(7, 5), nn.Linear(5, 5), nn.LayerNorm(5)
        self.ties = ties
        if ties:
            self.out = nn.Linear(5, 7, bias=False)
            self.out.weight = self.words.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.norm(self.inner(self.words(batch[0])))
        return F.cross_entropy(self.out(h) if self.ties else h @ self.words.weight.T, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def texts() -> TensorClients:
    words = [torch.arange(6) % (2 + client) for client in range(3)]
    return TensorClients([(x, x.roll(-1)) for x in words], num_classes=7)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("method", [FedRep, FedBABU])
def test_a_norm_at_the_end_is_no_head(method: Callable[[], FedAvg], ties: bool) -> None:
    said = "norm, a LayerNorm, and no head|the output layer has the weight of words"
    with pytest.raises(ConfigurationError, match=said) as error:
        run(Language(ties), texts(), method(), local_epochs=2)
    assert ("out.weight is words.weight" in str(error.value)) == ties


@pytest.mark.parametrize("part", ["private", "shared"])
def test_a_head_that_is_tied_to_the_body_is_not_split_off(part: str) -> None:
    with pytest.raises(ConfigurationError, match=r"head out .* from its body: out.weight is words"):
        run(Language(True), texts(), SharedPart(**{part: Layers(head=True)}))


class Tied(Language):
    """Has no output layer: it multiplies by the weight of the embedding."""

    def __init__(self, by: str) -> None:
        super().__init__(ties=False)
        self.by = by

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h, weight = self.norm(self.inner(self.words(batch[0]))), self.words.weight
        out = F.linear(h, weight) if self.by == "linear" else h @ weight.T
        return F.cross_entropy(out, batch[1])


@pytest.mark.parametrize("by", ["linear", "matmul"])
def test_an_output_layer_that_is_the_embedding_is_not_split_off(by: str) -> None:
    for method in (SharedPart(Layers(head=True)), MOON(), KNNPer()):
        with pytest.raises(ConfigurationError, match=r"Tied can't .*: .* has the weight of words"):
            run(Tied(by), texts(), method)
    run(Tied(by), texts(), SharedPart(Layers("inner")))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"private": Layers(types=nn.LayerNorm)}, "SharedPart is FedAvg here: its private part"),
        ({"private": Layers("network.1")}, r"is FedAvg here: .* it has network.1.weight, network"),
    ],
)
def test_a_part_without_a_trained_parameter_is_said(layers: Any, said: str) -> None:
    client = batchnorm_client()
    client.network[1].requires_grad_(False)
    with pytest.warns(UserWarning, match=said):
        run(client, small_data(), SharedPart(**layers))
