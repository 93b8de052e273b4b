"""FedPAC (section 2a.4)."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import FedPAC, FedRep
from pflight.callbacks.methods import fedpac
from pflight.callbacks.methods.fedpac import combinations
from pflight.errors import ConfigurationError
from pflight.states.head import EXTRA
from tests import networks_reference as reference
from tests.runs import ENGINES, quiet_trainer, run, sgd
from tests.worlds import assert_rows, body, client_t, head, world_t

MEANS, COUNTS = f"{EXTRA}.means", f"{EXTRA}.counts"


@ENGINES
def test_a4(engine: str) -> None:
    """A round after the first: the prototypes are those of the initial body."""
    callback, data = FedPAC(lam=1.0), world_t()
    federation = run(client_t(), data, callback, 0, engine=engine)
    state = federation.server.tensors(0)
    state[MEANS].data.copy_(torch.tensor([[1, 0], [1 / 3, 4 / 3], [-1, 0]]))
    state[COUNTS].data.copy_(torch.tensor([1.0, 3, 1]))
    quiet_trainer(1, callback).fit(federation, datamodule=data)
    local = [federation.clients.model("local/", torch.tensor([i]), *2 * [sent(federation, i)])
             for i in range(2)]  # fmt: skip
    heads = [head({n: v[0] for n, v in states.items()}) for states in local]
    assert_rows(heads[0], [[1.016738, -0.012236], [-0.012236, 1.016738], [-1.004502, -1.004502]])
    assert_rows(heads[1], [[0.986739, -0.024083], [0.025229, 1.025951], [-1.011968, -1.001868]])
    bodies = [body({n: v[0] for n, v in states.items()}) for states in local]
    assert_rows(bodies[0], [[1.021328, 0.008738], [-0.007929, 1.037995]])
    assert_rows(bodies[1], [[0.977932, -0.019965], [0.048091, 0.994178]])
    own = federation.client_state(0)
    assert_rows(body(own), [[0.995290, -0.008484], [0.025683, 1.011705]])
    assert_rows(head(own), [[1.011152, -0.014442], [-0.005260, 1.018453], [-1.005892, -1.004011]])
    weights = torch.tensor([[0.813793, 0.186207], [0.275862, 0.724138]], dtype=torch.float64)
    combined = sum(w * h for w, h in zip(weights[1], heads, strict=True))
    assert_rows(head(federation.client_state(1)), combined)


def sent(federation: Federation, client: int) -> Any:
    return federation.callback.broadcast(torch.tensor([client]))


class TestCombinations:
    def test_a4b(self) -> None:
        found = combinations(np.array([[0.0], [1], [3]]), np.array([0.5, 0.2, 0.1]), np.full(3, 9))
        expected = [
            [0.705882, 0.294118, 0],
            [0.299754, 0.528256, 0.171990],
            [0, 0.023256, 0.976744],
        ]
        assert found == pytest.approx(np.array(expected), abs=6e-7)

    def test_against_a_general_solver(self) -> None:
        random = np.random.default_rng(0)
        shared, spread = random.normal(size=(6, 8)), random.uniform(0.1, 3, 6)
        found = combinations(shared, spread, np.full(6, 5))
        for i in range(6):
            distances = shared[i] - shared
            matrix = distances @ distances.T + np.diag(spread)
            best = minimize(
                lambda a, matrix=matrix: a @ matrix @ a,
                np.full(6, 1 / 6),
                jac=lambda a, matrix=matrix: 2 * matrix @ a,
                bounds=[(0, 1)] * 6,
                constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
                tol=1e-14,
            ).x
            best[best < 1e-3] = 0
            assert found[i] == pytest.approx(best / best.sum(), abs=1e-6)

    @pytest.mark.parametrize("spread", [0.0, 2.0])
    def test_equal_clients_have_equal_weights(self, spread: float) -> None:
        found = combinations(np.ones((4, 3)), np.full(4, spread), np.full(4, 7))
        assert found == pytest.approx(np.full((4, 4), 0.25))

    def test_weights_that_are_all_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a cohort of more than a thousand."""
        monkeypatch.setattr(fedpac, "_SMALLEST", 0.3)
        found = combinations(np.ones((4, 1)), np.ones(4), np.full(4, 7))
        assert found == pytest.approx(np.full((4, 4), 0.25))

    def test_one_client(self) -> None:
        assert combinations(np.ones((1, 3)), np.zeros(1), np.ones(1)) == [[1]]

    def test_a_single_sample_attracts_nobody(self) -> None:
        """Its variance is 0, and counts as the largest."""
        shared, spread = np.zeros((3, 2)), np.array([0.0, 1, 4])
        found = combinations(shared, spread, np.array([1, 5, 5]))
        assert found[1] == pytest.approx(np.array([1, 4, 1]) / 6)


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_several_rounds(engine: str, momentum: float) -> None:
    data, lam, classes = reference.data(), 1.5, 3
    client = reference.client(optimizer=sgd(0.1))
    if momentum:
        client = reference.client(optimizer=sgd(0.1, momentum=momentum, weight_decay=0.01))
    callback = FedPAC(lam, head_lr=0.2)
    federation = run(client, data, callback, 4, engine=engine, local_epochs=2)
    shared = copy.deepcopy(client.network)
    heads: dict[int, nn.Module] = {}
    prototypes: dict[int, Tensor] = {}
    for round_, cohort in enumerate(reference.cohorts(federation)):
        models, told, spread = [], [], []
        for i in cohort:
            model = copy.deepcopy(shared)
            model[-1] = copy.deepcopy(heads.get(i, shared[-1]))
            x, y = data.samples(i, "train")
            z, n = reference.judged_features(model, x), len(y)
            own = reference.class_means(model, (x, y))
            means = torch.zeros(classes, 3, dtype=torch.float64)
            spread.append(0.0)
            for k, mean in own.items():
                share = float((y == k).sum()) / n
                means[k] = share * mean
                squares = z[y == k].square().sum(1).mean()
                spread[-1] += float(share * squares - share**2 * mean.square().sum()) / n
            told.append(means.flatten().numpy())
            target = {**own, **prototypes} if prototypes else {}

            def loss(
                network: nn.Sequential, x: Tensor, y: Tensor, target: dict[int, Tensor] = target
            ) -> Tensor:
                z = network[:-1](x)
                distance = sum(
                    ((z[y == k] - mean).square().sum() for k, mean in target.items()),
                    torch.zeros((), dtype=torch.float64),
                )
                return F.cross_entropy(network[-1](z), y) + lam * distance / (len(y) * 3)

            order = reference.batches(data, round_, i, 3)
            epoch = len(order) // 3
            step(model, model[-1], (x, y), order[:epoch], loss, 0.2, momentum, still=model[:-1])
            step(model, model[:-1], (x, y), order[epoch:], loss, 0.1, momentum, still=model[-1])
            models.append(model)
        weights = combinations(
            np.array(told), np.array(spread), data.num_samples()[cohort].double().numpy()
        )
        for i, row in zip(cohort, weights, strict=True):
            heads[i] = reference.average([model[-1] for model in models], row.tolist())
        sizes: dict[int, list[tuple[int, Tensor]]] = {}
        for i, model in zip(cohort, models, strict=True):
            own = data.samples(i, "train")
            for k, mean in reference.class_means(model, own).items():
                sizes.setdefault(k, []).append((int((own[1] == k).sum()), mean))
        for k, parts in sizes.items():
            prototypes[k] = sum(n * m for n, m in parts) / sum(n for n, _ in parts)
        shared = reference.average(models, data.num_samples()[cohort].tolist())
    for i in range(6):
        model = copy.deepcopy(shared)
        model[-1] = heads.get(i, shared[-1])
        reference.assert_network(federation.client_state(i), model)


def step(
    network: nn.Sequential,
    part: nn.Module,
    samples: tuple[Tensor, Tensor],
    order: list[Any],
    loss: reference.Loss,
    lr: float,
    momentum: float,
    still: nn.Module,
) -> None:
    """Train a part of the network by a new SGD, the other part in evaluation mode."""
    velocities = [torch.zeros_like(p) for p in part.parameters()]
    network.train()
    still.eval()
    for batch in order:
        x, y = (t[torch.as_tensor(batch)] for t in samples)
        gradients = torch.autograd.grad(loss(network, x, y), list(part.parameters()))
        with torch.no_grad():
            for p, v, g in zip(part.parameters(), velocities, gradients, strict=True):
                v.mul_(momentum).add_(g + (0.01 * p if momentum else 0))
                p -= lr * v


@pytest.mark.short("sequential")
@ENGINES
def test_a_client_by_itself_is_fedrep(engine: str) -> None:
    data = reference.data(cohort_size=1, counts=[9])
    callback = FedPAC(lam=0, head_lr=0.1)
    one = run(reference.client(), data, callback, 3, engine=engine, local_epochs=2)
    other = run(reference.client(), data, FedRep(), 3, engine=engine, local_epochs=3)
    torch.testing.assert_close(one.client_state(0), other.client_state(0))


def test_newcomers_have_the_mean_of_heads() -> None:
    data = reference.data(holdout_clients=0.34)
    federation = run(reference.client(), data, FedPAC(), 2)
    newcomer = int(federation.clients.newcomers[0])
    mean = {n: v.detach() for n, v in federation.server_states()[0].items()}
    torch.testing.assert_close(federation.client_state(newcomer), mean, rtol=0, atol=0)
    assert any(
        not federation.client_state(i)["network.3.weight"].equal(mean["network.3.weight"])
        for i in range(6)
    )


def test_what_travels() -> None:
    size = sum(value.nbytes for value in reference.client().state_dict().values())
    federation = run(reference.client(), reference.data(), FedPAC(), 2)
    matrix = 3 * 3 * 8
    assert federation.history[-1].bytes_down == 3 * (size + matrix)
    assert federation.history[-1].bytes_up == 3 * (size + 2 * matrix + 3 * 8 + 8)


def test_steps_have_no_phases() -> None:
    with pytest.raises(ConfigurationError, match="FedPAC counts local epochs"):
        run(reference.client(), reference.data(), FedPAC(), local_steps=3)
