"""FedEC, FedEC-wo and FedEC-l2: the elastic client under Reptile (section 3.2)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight import Federation, modifiers
from pflight.callbacks import FedAvg, FedEC, Reptile, ServerCallback
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier, ElasticClient
from pflight.models.client_methods import Elastic
from tests import reference
from tests.runs import (
    CLASSES,
    FEATURES,
    Point,
    assert_same,
    batches_of,
    batchnorm_client,
    dropout_client,
    failing,
    flat,
    linear_client,
    network_client,
    one_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
)


class TestTheLoss:
    """M1: the logits are the parameters, (0, 0), the class is 0, the history's (0, ln 3)."""

    batch = torch.zeros(1, 1), torch.tensor([0])

    def trained(self, **options: Any) -> tuple[float, list[float], list[float]]:
        """Return the loss, its gradient, and the parameters after a step of 0.1."""
        module = Classifier(Point(), num_classes=2, optimizer=sgd(0.1))
        history = {"network.theta": torch.tensor([0, math.log(3)], dtype=torch.float64)}
        client = one_client(module, Elastic(**options), history)
        loss = client.client_method.loss(client, self.batch)
        optimizer = client.module.configure_optimizers()
        loss.backward()
        optimizer.step()
        theta = client.module.network.theta
        return loss.item(), theta.grad.tolist(), theta.tolist()

    def test_kl(self) -> None:
        loss, gradient, stepped = self.trained()
        assert loss == pytest.approx(0.8239592, abs=1e-7)
        assert gradient == pytest.approx([-0.25, 0.25])
        assert stepped == pytest.approx([0.025, -0.025])

    def test_the_gradient_is_that_of_the_mixed_target(self) -> None:
        _, gradient, _ = self.trained(alpha=3.0)
        mixed = (1 + 3 * 0.25) / 4
        assert gradient == pytest.approx([4 * (0.5 - mixed), -4 * (0.5 - mixed)])

    @pytest.mark.parametrize("options", [{"alpha": 0.0}, {"constraint": None}])
    def test_unconstrained(self, options: dict[str, Any]) -> None:
        assert self.trained(**options)[2] == pytest.approx([0.05, -0.05])

    def test_l2(self) -> None:
        loss, _, stepped = self.trained(constraint="l2")
        assert stepped == pytest.approx([0.05, 0.0598612], abs=1e-7)
        assert loss == pytest.approx(math.log(2) + math.log(3) ** 2 / 2)

    def test_without_history_it_is_the_task_alone(self) -> None:
        for constraint in ("kl", "l2"):
            module, client_method = (
                Classifier(Point((1.0, 0.0)), num_classes=2),
                Elastic(1.0, constraint),
            )
            expected = F.cross_entropy(torch.tensor([[1.0, 0.0]]), self.batch[1]).item()
            client = one_client(module, client_method)
            assert client_method.loss(client, self.batch).item() == pytest.approx(expected)
            zeros = {"network.theta": torch.zeros(2, dtype=torch.float64)}
            unseen = one_client(module, client_method, zeros)
            unseen.seen.zero_()
            assert client_method.loss(unseen, self.batch).item() == pytest.approx(expected)

    def test_the_history_is_in_evaluation_mode_and_does_not_change(self) -> None:
        layers = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES)
        module = Classifier(nn.Sequential(*layers), CLASSES)
        past = Classifier(nn.Sequential(*(type(m)(*a) for m, a in zip(
            layers, [(FEATURES, 6), (6,), (0.5,), (6, CLASSES)], strict=True
        ))), CLASSES)  # fmt: skip
        past.network[1].running_mean += 0.7
        history = {name: value.clone() for name, value in past.state_dict().items()}
        client_method, memory = Elastic(alpha=2.0), {name: v.clone() for name, v in history.items()}
        client = one_client(module, client_method, memory)
        network = client.module.network
        network[2].eval()  # a user's own choice stays
        x, y = torch.randn(9, FEATURES), torch.randint(CLASSES, (9,))
        logits = network(x)
        buffers = network[1].running_mean.clone()
        network[1].reset_running_stats()
        loss = client_method.loss(client, (x, y))
        loss.backward()
        penalty = loss - F.cross_entropy(logits, y)
        before = past.eval()(x).softmax(dim=1)
        expected = (before * (before.log() - logits.log_softmax(dim=1))).sum(dim=1).mean()
        assert penalty.item() == pytest.approx(2 * expected.item(), rel=1e-5)
        assert torch.equal(network[1].running_mean, buffers)
        assert network[1].num_batches_tracked == 1
        assert network[1].training
        assert not network[2].training
        assert_same(memory, history)
        assert all(value.grad is None for value in memory.values())


def softmax(logits: np.ndarray) -> np.ndarray:
    excess = np.exp(logits - logits.max(axis=1, keepdims=True))
    return excess / excess.sum(axis=1, keepdims=True)


def plain_fedec(
    data: TensorClients, start: np.ndarray, cohorts: list[list[int]], alpha: float,
    constraint: str | None, lr: float, momentum: float, step: float,
) -> tuple[np.ndarray, dict[int, np.ndarray]]:  # fmt: skip
    """Return the server's weights and each client's history, computed in plain NumPy."""
    samples = [data.samples(i, "train") for i in range(data.num_clients)]
    phi, history = start.copy(), {}
    for round_, cohort in enumerate(cohorts):
        returned = []
        for client in cohort:
            theta, velocity, past = phi.copy(), np.zeros_like(phi), history.get(client)
            x, y = (np.asarray(part, dtype=None) for part in samples[client])
            for batch in batches_of(data, round_, client, epochs=2):
                inputs, target = x[batch], np.eye(CLASSES)[y[batch]]

                def predict(weights: np.ndarray, inputs: np.ndarray = inputs) -> np.ndarray:
                    matrix = weights[:-CLASSES].reshape(CLASSES, FEATURES)
                    return softmax(inputs @ matrix.T + weights[-CLASSES:])

                excess = predict(theta) - target
                if past is not None and constraint == "kl":
                    excess += alpha * (predict(theta) - predict(past))
                excess /= len(batch)
                gradient = np.concatenate([(excess.T @ inputs).ravel(), excess.sum(axis=0)])
                if past is not None and constraint == "l2":
                    gradient += alpha * (theta - past)
                velocity = momentum * velocity + gradient
                theta = theta - lr * velocity
            returned.append(theta)
        for client, theta in zip(cohort, returned, strict=True):
            history[client] = theta
        phi = phi + step * np.mean([theta - phi for theta in returned], axis=0)
    return phi, history


@pytest.mark.parametrize("constraint", ["kl", "l2", None])
def test_several_rounds_of_some_clients(constraint: str | None) -> None:
    data = small_data(cohort_size=2, dtype=torch.float64, holdout_clients=0.17)
    client = linear_client(double=True, optimizer=sgd(0.2, momentum=0.5))
    callback = FedEC(0.7, constraint, lr=0.6)
    federation = run(client, data, callback, rounds=5, local_epochs=2)
    cohorts = [entry.clients for entry in federation.history]
    assert max(sum(i in cohort for cohort in cohorts) for i in range(6)) > 2
    phi, history = plain_fedec(
        data, flat(client.state_dict()), cohorts, 0.7, constraint, 0.2, 0.5, 0.6
    )
    assert flat(federation.server_states()[0]) == pytest.approx(phi, rel=1e-11, abs=1e-13)
    assert set(history) < set(range(6))
    for i in range(6):
        expected = history.get(i, phi)
        assert flat(federation.client_state(i)) == pytest.approx(expected, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"constraint": None}])
def test_without_the_constraint_it_is_reptile(options: dict[str, Any]) -> None:
    data = small_data(cohort_size=3)
    elastic = run(dropout_client(), data, FedEC(lr=0.7, **options), rounds=5)
    plain = run(dropout_client(), data, Reptile(lr=0.7), rounds=5)
    assert_same(elastic.server_states()[0], plain.server_states()[0])


def test_a_whole_step_without_the_constraint_is_fedavg() -> None:
    data = small_data(cohort_size=3)
    elastic = run(linear_client(), data, FedEC(constraint=None), rounds=4)
    plain = run(linear_client(), data, FedAvg("uniform"), rounds=4)
    assert_same(elastic.server_states()[0], plain.server_states()[0])


def test_the_first_participation_is_unconstrained() -> None:
    data = small_data(dtype=torch.float64)
    first = run(linear_client(double=True), data, FedEC(alpha=5.0))
    plain = run(linear_client(double=True), data, Reptile())
    assert_same(first.server_states()[0], plain.server_states()[0])
    second = run(linear_client(double=True), data, FedEC(alpha=5.0), rounds=2)
    again = run(linear_client(double=True), data, Reptile(), rounds=2)
    assert flat(second.server_states()[0]) != pytest.approx(flat(again.server_states()[0]))


def test_the_history_keeps_its_own_buffers_and_never_travels() -> None:
    data = small_data(cohort_size=3)
    client = batchnorm_client()
    federation = run(client, data, FedEC(), rounds=3)
    seen = {i for entry in federation.history for i in entry.clients}
    states = [federation.client_state(i) for i in sorted(seen)]
    means = {tuple(state["network.1.running_mean"].tolist()) for state in states}
    assert len(means) == len(seen)
    size = sum(value.nbytes for value in client.state_dict().values())
    assert all(entry.bytes_down == entry.bytes_up == 3 * size for entry in federation.history)
    last = federation.history[-1].clients[0]
    assert federation.client_state(last)["network.1.num_batches_tracked"] > 0


class TestWhoIsJudgedByWhat:
    """Known clients by their history; others by what the server sends, fine-tuned if asked."""

    @pytest.fixture
    def data(self) -> TensorClients:
        return small_data(holdout_clients=0.34)

    def fit(self, data: TensorClients, **options: Any) -> Federation:
        federation = Federation(linear_client(), **options)
        trainer = quiet_trainer(2, FedEC(lr=0.5))
        trainer.fit(federation, datamodule=data)
        trainer.test(federation, datamodule=data, verbose=False)
        return federation

    def test_without_fine_tuning(self, data: TensorClients) -> None:
        federation = self.fit(data)
        phi = federation.server_states()[0]
        for i in range(6):
            state = federation.client_state(i)
            if i in data.new_clients:
                assert_same(state, phi)
            else:
                assert flat(state) != pytest.approx(flat(phi))

    def test_with_fine_tuning(self, data: TensorClients) -> None:
        federation = self.fit(data, finetune_epochs=2)
        plain = self.fit(data)
        for i in range(6):
            state = federation.client_state(i)
            if i in data.new_clients:
                assert flat(state) != pytest.approx(flat(plain.server_states()[0]))
            else:
                assert_same(state, plain.client_state(i))
        metrics = {name: federation.client_metrics("test", name) for name in ("", "finetuned/")}
        new = torch.zeros(6, dtype=torch.bool)
        new[data.new_clients] = True
        assert torch.equal(metrics[""]["loss"][new], metrics["finetuned/"]["loss"][new])
        assert (metrics[""]["loss"][~new] != metrics["finetuned/"]["loss"][~new]).all()

    def test_fine_tuning_starts_at_the_server_and_leaves_the_history_alone(
        self, data: TensorClients
    ) -> None:
        elastic, plain = self.fit(data, finetune_epochs=1), Federation(
            linear_client(), finetune_epochs=1
        )  # fmt: skip
        trainer = quiet_trainer(2, Reptile(lr=0.5))
        trainer.fit(plain, datamodule=data)
        plain.server[0].load_state_dict(elastic.server[0].state_dict())
        trainer.test(plain, datamodule=data, verbose=False)
        torch.testing.assert_close(
            elastic.client_metrics("test", "finetuned/")["loss"],
            plain.client_metrics("test", "finetuned/")["loss"],
        )


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_client_that_fails_keeps_its_history() -> None:
    def fit(*clients: Classifier) -> Federation:
        federation = Federation(clients[0])
        for rounds, client in enumerate(clients, start=1):
            federation.clients.module = client
            quiet_trainer(rounds, FedEC()).fit(federation, datamodule=small_data())
        return federation

    first = fit(linear_client())
    second = fit(linear_client(), linear_client(failing()))
    assert second.history[1].failed == [3]
    assert_same(second.client_state(3), first.client_state(3))
    assert flat(second.client_state(2)) != pytest.approx(flat(first.client_state(2)))


def test_alone_under_a_trainer_it_is_an_ordinary_module() -> None:
    data = small_data()
    elastic, plain = linear_client(ElasticClient, alpha=3.0), linear_client()
    for client in (elastic, plain):
        quiet_trainer(2).fit(client, datamodule=data.centralized())
    assert_same(dict(elastic.state_dict()), dict(plain.state_dict()))


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="FedEC: alpha must be at least 0, got -1"):
        FedEC(alpha=-1)
    with pytest.raises(
        ConfigurationError, match=r"FedEC: .* must be 'kl', 'l2' or null, got 'cos'"
    ):
        FedEC(constraint="cos")
    with pytest.raises(ConfigurationError, match="ElasticClient: alpha must be at least 0, got -1"):
        ElasticClient(nn.Linear(1, 2), 2, alpha=-1)
    with pytest.raises(ConfigurationError, match="must be 'kl', 'l2' or null, got 'cos'"):
        ElasticClient(nn.Linear(1, 2), 2, constraint="cos")


def test_the_reference_is_reptile_without_history() -> None:
    """The plain NumPy computation above agrees with the older one of FedAvg."""
    data = small_data(dtype=torch.float64)
    start = flat(linear_client(double=True).state_dict())
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    cohorts = [[0, 2], [1, 2, 5]]

    def batches(round_: int, client: int) -> list[np.ndarray]:
        return batches_of(data, round_, client, epochs=2)

    expected = reference.fedavg(world, start, cohorts, batches, 0.2, "uniform")
    phi, _ = plain_fedec(data, start, cohorts, 0.0, None, 0.2, 0.0, 1.0)
    assert phi == pytest.approx(expected, rel=1e-12)


class Twice(nn.Module):
    """Uses a layer twice, which may have a name for each use."""

    def __init__(self, two_names: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        if two_names:
            self.second = self.first
        self.output = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        second = getattr(self, "second", self.first)
        return self.output(second(self.first(x).tanh()).tanh())


@pytest.mark.short("sequential")
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_module_with_two_names_is_one(engine: Any) -> None:
    fits = [
        run(
            network_client(Twice(two_names)).double(),
            small_data(dtype=torch.float64),
            FedEC(),
            rounds=3,
            engine=engine,
        )
        for two_names in (True, False)
    ]
    twice, once = (fit.server_states()[0] for fit in fits)
    assert_same({name: twice[name] for name in once}, once)


@pytest.mark.parametrize("constraint", ["kl", "l2"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_mean_constraint_is_logged(constraint: str, engine: str) -> None:
    """With a step a round, it is that of the sent model and the client's last one."""
    data = small_data(batch_size=None, dtype=torch.float64)

    def fit(rounds: int, callback: ServerCallback, **options: Any) -> Federation:
        client = linear_client(double=True)
        return run(client, data, callback, rounds, engine=engine, local_steps=1, **options)

    def fedec() -> FedEC:
        return FedEC(alpha=3.0, constraint=constraint)

    before, after = fit(1, fedec()), fit(2, fedec())
    phi, terms = before.server_states()[0], []
    for i in range(6):
        last, x = before.client_state(i), data.samples(i, "train")[0]
        if constraint == "l2":
            distance = sum((phi[name] - last[name]).square().sum() for name in phi)
            terms.append(3.0 / 2 * float(distance))
            continue
        log_p, log_q = (
            F.linear(x, s["network.weight"], s["network.bias"]).log_softmax(1) for s in (last, phi)
        )
        terms.append(3.0 * float((log_p.exp() * (log_p - log_q)).sum(1).mean()))
    first, second = (entry.metrics for entry in after.history)
    assert "fedec/constraint" not in first  # nobody has a history
    assert second["fedec/constraint"] == pytest.approx(np.mean(terms))
    combined = fit(2, Reptile(modifiers=[modifiers.Elastic(3.0, constraint)]))
    assert combined.history[1].metrics["fedec/constraint"] == pytest.approx(np.mean(terms))
    none = fit(2, FedEC(alpha=3.0, constraint=None))
    assert "fedec/constraint" not in none.history[1].metrics
    for left, right in zip(none.history, after.history, strict=True):
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)


def test_engines_log_the_same_constraint() -> None:
    """Batches are filled up, some clients have no history, and some take more steps."""
    data = small_data(dtype=torch.float64, cohort_size=3)
    logged = [
        [
            entry.metrics.get("fedec/constraint")
            for entry in run(
                linear_client(double=True), data, FedEC(), 5, engine=engine, local_epochs=2
            ).history
        ]
        for engine in ("sequential", "vectorized")
    ]
    assert logged[0][0] is None
    assert all(value > 0 for value in logged[0][3:])
    assert logged[0] == pytest.approx(logged[1])
