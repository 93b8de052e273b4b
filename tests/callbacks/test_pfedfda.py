"""pFedFDA (section 2b.5)."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from pflight.callbacks import PFedFDA
from pflight.callbacks.methods.gaussians import Gaussians, Judged
from pflight.callbacks.methods.pfedfda import Discriminating, halves
from pflight.datamodules import TensorClients
from pflight.randomness import Purpose, generator
from pflight.states.head import EXTRA
from tests import networks_reference as reference
from tests.runs import CLASSES, ENGINES, assert_same, quiet_trainer, run, samples
from tests.worlds import assert_rows, close

MEANS, COVARIANCE = f"{EXTRA}.means", f"{EXTRA}.covariance"


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestF1:
    Z = double([[0, 0], [2, 1], [1, -1], [1, 3], [3, 1], [4, 2], [2, 3], [5, 4]])
    Y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    FOLDS = torch.tensor([0, 1] * 4)
    SENT = Gaussians(double([[0, 0], [2, 2]]), torch.eye(2, dtype=torch.float64))
    PRIOR = double([0.5, 0.5])

    def test_statistics(self) -> None:
        means, covariance = self.SENT.of(self.Z, self.Y, ridge=1.0)
        assert_rows(means, [[1, 0.75], [3.5, 2.5]])
        assert_rows(covariance, [[2, 0.428571], [0.428571, 2.964286]])

    def test_the_head(self) -> None:
        local = self.SENT.of(self.Z, self.Y, ridge=1.0)
        weight, bias = self.SENT.mixed(local, double([0.5])).head(self.PRIOR, 1e-4)
        assert_rows(weight, [[0.311108, 0.155561], [1.697367, 0.951666]])
        assert_rows(bias - bias.new_tensor(0.5).log(), [-0.106945, -3.404504])
        assert_rows(bias, [-0.800092, -4.097651])

    def test_the_losses(self) -> None:
        found = [self.loss(double([beta])) for beta in (0.0, 0.5, 1.0)]
        assert found == [close(1.550585), close(1.540690), close(2.095119)]

    @pytest.mark.parametrize("at", [(0.0, 1.0), (0.3, 0.6), (1.0, 0.0)])
    def test_the_derivatives(self, at: tuple[float, float]) -> None:
        """Along the axes in which both covariances are diagonal, all is as by the discriminant."""
        own, others = ((self.Z[fold], self.Y[fold]) for fold in (self.FOLDS == 0, self.FOLDS == 1))
        local = self.SENT.of(*own, ridge=1.0)
        share = double(at).requires_grad_()
        weight, bias = self.SENT.mixed(local, share).head(self.PRIOR, 1e-4)
        wanted = F.cross_entropy(others[0] @ weight.T + bias, others[1])
        loss, slopes = Judged.of(self.SENT, local, 1e-4, self.PRIOR, *others).loss(*at)
        assert loss == pytest.approx(float(wanted.detach()))
        (gradient,) = torch.autograd.grad(wanted, share)
        assert slopes.tolist() == pytest.approx(gradient.tolist())

    def test_the_search(self) -> None:
        known = self.Z, self.Y, self.FOLDS, self.SENT, self.PRIOR
        one, two = (Discriminating(betas=betas).share(*known) for betas in (1, 2))
        assert one.tolist() == [pytest.approx(0.311522, abs=2e-6)]
        assert two.tolist() == pytest.approx([0.257002, 1], abs=2e-6)
        assert (self.loss(one), self.loss(two)) == (close(1.507300), close(1.452170))

    def loss(self, share: Tensor) -> float:
        total = 0.0
        for fold in (0, 1):
            own = self.Z[fold == self.FOLDS], self.Y[fold == self.FOLDS]
            others = self.Z[fold != self.FOLDS], self.Y[fold != self.FOLDS]
            local = self.SENT.of(*own, ridge=1.0)
            weight, bias = self.SENT.mixed(local, share).head(self.PRIOR, 1e-4)
            total += float(F.cross_entropy(others[0] @ weight.T + bias, others[1]))
        return total


def adapted(
    z: Tensor, y: Tensor, mean: Tensor, covariance: Tensor, prior: Tensor, folds: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the statistics of a client with one share, found by another search."""

    def statistics(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.stack([z[y == k].mean(0) if (y == k).any() else mean[k] for k in range(3)])
        spread = sum(torch.outer(a, a) for a in z - own[y]) / max(len(z) - 1, 1)
        return own, spread + torch.eye(z.shape[1], dtype=torch.float64)

    def mixture(share: float, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        own, spread = statistics(z, y)
        return share * own + (1 - share) * mean, share * spread + (1 - share) * covariance

    def loss(share: float) -> float:
        total = 0.0
        for fold in (0, 1):
            weight, bias = linear(*mixture(share, z[folds == fold], y[folds == fold]), prior)
            part = folds == 1 - fold
            total += float(F.cross_entropy(z[part] @ weight.T + bias, y[part]))
        return total

    share = 0.0
    if (folds >= 0).any():
        share = minimize_scalar(loss, bounds=(0, 1), method="bounded", options={"xatol": 1e-10}).x
        share = min((0.0, 1.0, share), key=loss)
    return mixture(share, z, y)


def linear(mean: Tensor, covariance: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    d = len(covariance)
    regular = (1 - 1e-4) * covariance + 1e-4 * covariance.trace() / d * torch.eye(d).double()
    weight = mean @ regular.inverse()
    return weight, prior.log() - 0.5 * (mean * weight).sum(1)


@pytest.mark.short("sequential")
@ENGINES
def test_several_rounds(engine: str) -> None:
    data, client, epochs = reference.data(), reference.client(), 2
    start = run(client, data, PFedFDA(), 0, engine=engine).layout.template
    federation = run(client, data, PFedFDA(betas=1), 3, engine=engine, local_epochs=epochs)
    server = copy.deepcopy(client.network)
    mean, covariance = start[MEANS], start[COVARIANCE]
    shares = data.class_counts("train").double() / data.num_samples().unsqueeze(1)
    priors = (shares + 1e-4) / (1 + 3e-4)

    def own(model: nn.Sequential, i: int, round_: int) -> tuple[Tensor, Tensor]:
        x, y = data.samples(i, "train")
        folds = halves(y, generator(Purpose.LOCAL_WORK, 0, round_, i))
        return adapted(reference.judged_features(model, x), y, mean, covariance, priors[i], folds)

    for round_, cohort in enumerate(reference.cohorts(federation)):
        models, sent = [], []
        for i in cohort:
            model = copy.deepcopy(server)
            weight, bias = linear(mean, covariance, priors[i])

            def loss(
                network: nn.Sequential,
                x: Tensor,
                y: Tensor,
                weight: Tensor = weight,
                bias: Tensor = bias,
            ) -> Tensor:
                return F.cross_entropy(network[:-1](x) @ weight.T + bias, y)

            order, rest = reference.batches(data, round_, i, epochs), model[-1].parameters()
            reference.train(model, data.samples(i, "train"), order, loss, rest=rest)
            models.append(model)
            sent.append(own(model, i, round_))
        weights = data.num_samples()[cohort].double()
        weights /= weights.sum()
        server = reference.average(models, weights.tolist())
        mean, covariance = (
            sum(w * part for w, part in zip(weights, parts, strict=True))
            for parts in zip(*sent, strict=True)
        )
    state = federation.server.tensors(0)
    torch.testing.assert_close(state[MEANS], mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[COVARIANCE], covariance, rtol=1e-5, atol=1e-5)
    server.eval()
    for i in range(6):
        x = data.samples(i, "test")[0]
        weight, bias = linear(*own(server, i, 3), priors[i])
        expected = server[:-1](x) @ weight.T + bias
        torch.testing.assert_close(federation.client_module(i)(x), expected, rtol=1e-4, atol=1e-4)
    losses = []  # under the server's own statistics
    for i in range(6):
        x, y = data.samples(i, "test")
        weight, bias = linear(mean, covariance, priors[i])
        losses.append(F.cross_entropy(server[:-1](x) @ weight.T + bias, y))
    (values,) = quiet_trainer().test(federation, datamodule=data, verbose=False)
    assert values["test/server/loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)


@pytest.mark.parametrize("seed", [652, 765, 1343, 1479])
def test_the_share_is_at_the_least_of_several_minima(seed: int) -> None:
    """Compared with a fine grid."""
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    y = torch.randint(4, (12,), generator=random)
    z, factor = normal(4, 6)[y] + normal(12, 6), normal(6, 6)
    sent = Gaussians(normal(4, 6), 0.2 * factor @ factor.T + 0.5 * torch.eye(6).double())
    prior = (torch.bincount(y, minlength=4) + 0.01).double() / 12.04
    folds, client_method = halves(y, random), Discriminating(ridge=0.01, betas=1)
    parts = [(z[folds == fold], y[folds == fold]) for fold in (0, 1)]
    judged = [
        Judged.of(sent, sent.of(*own, 0.01), client_method.eps, prior, *other)
        for own, other in (parts, parts[::-1])
    ]

    def loss(share: float) -> float:
        return sum(one.loss(share, share)[0] for one in judged)

    grid = np.array([loss(share) for share in np.linspace(0, 1, 201)])
    rises = np.diff(grid) > 0
    assert (np.append([True], ~rises) & np.append(rises, [True])).sum() == 2
    assert loss(client_method.share(z, y, folds, sent, prior).item()) <= grid.min() + 1e-9


def test_the_halves_are_stratified() -> None:
    y = torch.tensor([0] * 5 + [1] * 4 + [2])
    folds = halves(y, torch.Generator().manual_seed(0))
    assert [int((folds[y == k] == 0).sum()) for k in range(3)] == [3, 2, 0]
    assert folds[y == 2].tolist() == [-1]
    assert folds.equal(halves(y, torch.Generator().manual_seed(0)))
    assert not folds.equal(halves(y, torch.Generator().manual_seed(1)))


@ENGINES
def test_few_samples_and_missing_classes(engine: str) -> None:
    """A client without a class of two samples sends what it got."""
    pairs = []
    for i, own in enumerate(([0], [1, 1], [0, 1, 1, 0], [1] * 5)):
        pairs.append((samples(len(own), i, torch.float64)[0], torch.tensor(own)))
    data = TensorClients(pairs, test=pairs, val=pairs, num_classes=CLASSES, batch_size=4)
    client = reference.client()
    federation = run(client, data, PFedFDA(), 2, engine=engine)
    start, state = federation.layout.template, federation.server.tensors(0)
    torch.testing.assert_close(state[MEANS][2], start[MEANS][2])  # which nobody has
    judged = federation.callback.personalize(torch.arange(4))
    torch.testing.assert_close(judged[MEANS][0], state[MEANS].detach())
    assert all(value.isfinite().all() for value in judged.values())


def test_the_head_neither_trains_nor_travels() -> None:
    client = reference.client()
    federation = run(client, reference.data(), PFedFDA(), 2)
    server, start = federation.server_states()[0], client.state_dict()
    names = "network.3.weight", "network.3.bias"
    assert_same({n: server[n] for n in names}, {n: start[n] for n in names})
    body = sum(value.nbytes for name, value in start.items() if name not in names)
    (*_, entry) = federation.history
    assert entry.bytes_down == entry.bytes_up == 3 * (body + 8 * (3 * 3 + 3 * 4 // 2))


def test_newcomers_adapt_without_training() -> None:
    data = reference.data(holdout_clients=0.34)
    federation = run(reference.client(), data, PFedFDA(), 2)
    newcomers = federation.clients.newcomers
    states = federation.callback.personalize(newcomers)
    sent = federation.server.tensors(0)[MEANS]
    assert any(not mean.equal(sent) for mean in states[MEANS])
