"""What clients do around their training: each half alone, at the clients of world Q."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close

from pflight.callbacks import (
    APFL,
    L2GD,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAvg,
    FedDANE,
    FedEC,
    PerFedAvg,
    PFedMe,
    ServerCallback,
)
from pflight.clients import Clients
from pflight.datamodules import TensorClients
from pflight.method import OWN, PERSONAL
from pflight.models.client_methods.l2gd import SHARE
from tests.runs import ENGINES, A, B, quadratic_client, run, world_q

IDS = torch.arange(3)
THETA = "network.theta"
SENT = torch.tensor([[0.5, -2.0]] * 3, dtype=torch.double)
ZERO = torch.zeros(3, 2, dtype=torch.double)


def clients_of(callback: ServerCallback, rounds: int = 0, engine: str = "sequential") -> Clients:
    """Return the clients after some rounds, of which each asks two of them."""
    data = [world_q().samples(i, "train") for i in range(3)]
    two = TensorClients(data, num_classes=2, batch_size=None, cohort_size=2)
    return run(quadratic_client(), two, callback, rounds, engine=engine).clients


def sent(**more: Tensor) -> TensorDict:
    """Return one model for all clients, with what else is sent."""
    return TensorDict({THETA: SENT, **more}, batch_size=[3])


def starts(clients: Clients, what: TensorDict) -> TensorDict:
    return clients.outer_method.before_training(clients, IDS, what)


def slopes(theta: Tensor) -> Tensor:
    """Return every client's gradient at its model ``[3, 2]``."""
    a, b = (torch.tensor(values, dtype=torch.double) for values in (A, B))
    return a * (theta - b)


def newcomer(clients: Clients) -> Tensor:
    """Return a mask of the one client that has not been asked in a first round."""
    new = ~torch.isin(IDS, torch.tensor(clients.history[0].clients))
    assert new.sum() == 1
    return new


def test_by_default_clients_start_and_are_judged_where_the_server_says() -> None:
    clients = clients_of(FedAvg(), 1)
    assert torch.equal(starts(clients, sent())[THETA], SENT)
    assert torch.equal(clients.judged(IDS, sent())[THETA], SENT)


def test_fedecs_are_judged_by_what_they_remember() -> None:
    clients = clients_of(FedEC(constraint="l2"), 1)
    new, judged = newcomer(clients), clients.judged(IDS, sent())[THETA]
    assert torch.equal(judged[new], SENT[new])
    assert_close(judged[~new], (ZERO - 0.1 * slopes(ZERO))[~new])
    assert torch.equal(starts(clients, sent())[THETA], SENT)


@ENGINES
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffolds_take_their_gradients_with_option_1_alone(option: str, engine: str) -> None:
    clients = clients_of(SCAFFOLD(option=option), engine=engine)
    control = ZERO + 7.0  # which does not correct them
    found = starts(clients, sent(**{f"{OWN}control.{THETA}": control}))
    assert torch.equal(found[f"{OWN}control.{THETA}"], control)
    if option == "I":
        assert_close(found[f"{OWN}gradient.{THETA}"], slopes(SENT))
    else:
        assert f"{OWN}gradient.{THETA}" not in {*found.keys()}


@ENGINES
def test_feddanes_are_corrected_where_a_mean_gradient_is_sent(engine: str) -> None:
    clients, name = clients_of(FedDANE(), engine=engine), f"{OWN}correction.{THETA}"
    assert torch.equal(starts(clients, sent())[name], ZERO)
    assert_close(starts(clients, sent(**{name: ZERO + 7.0}))[name], 7.0 - slopes(SENT))
    assert_close(starts(clients, sent(**{name: ZERO}))[name], -slopes(SENT))


@pytest.mark.parametrize("callback", [Ditto(lam=0.0), APFL(alpha=0.25)], ids=["Ditto", "APFL"])
def test_personal_models_begin_as_what_is_sent_and_stay(callback: ServerCallback) -> None:
    clients, name = clients_of(callback, 1), f"{PERSONAL}{THETA}"
    new, found = newcomer(clients), starts(clients, sent())
    assert torch.equal(found[THETA], SENT)
    assert torch.equal(found[name][new], SENT[new])
    share = 1.0 if isinstance(callback, Ditto) else 0.25
    own = ZERO - 0.1 * share * slopes(ZERO)
    assert_close(found[name][~new], own[~new])
    judged = clients.judged(IDS, sent())[THETA]
    assert_close(judged[new], SENT[new])
    assert_close(judged[~new], (share * own + (1 - share) * SENT)[~new])


def test_pfedmes_begin_at_what_is_sent_and_newcomers_train_before_they_are_judged() -> None:
    lam, step = 2.0, 0.05
    callback = PFedMe(lam=lam, personal_lr=step, personal_steps=1)
    clients = clients_of(callback, 1)
    new, found = newcomer(clients), starts(clients, sent())
    assert torch.equal(found[f"{OWN}theta.{THETA}"], SENT)
    judged = clients.judged(IDS, sent())[THETA]
    assert_close(judged[new], (SENT - step * slopes(SENT))[new])
    assert_close(judged[~new], (ZERO - step * slopes(ZERO))[~new])
    clients.outer_method.train_newcomers = False
    assert torch.equal(clients.judged(IDS, sent())[THETA][new], SENT[new])


def test_per_fedavgs_adapt_before_they_are_judged() -> None:
    clients = clients_of(PerFedAvg(alpha=0.1, steps=2))
    once = SENT - 0.1 * slopes(SENT)
    assert_close(clients.judged(IDS, sent())[THETA], once - 0.1 * slopes(once))
    assert torch.equal(starts(clients, sent())[THETA], SENT)


def test_l2gds_begin_at_their_own_models_some_way_to_the_mean() -> None:
    clients = clients_of(L2GD(), 1)
    new = newcomer(clients)
    own = torch.where(new.unsqueeze(1), SENT, ZERO - 0.1 * slopes(ZERO))
    assert_close(clients.judged(IDS, sent())[THETA], own)
    assert_close(starts(clients, sent())[THETA], own)
    share = torch.full((3,), 0.25, dtype=torch.double)
    assert_close(starts(clients, sent(**{SHARE: share}))[THETA], 0.75 * own + 0.25 * SENT)
    nothing = TensorDict({}, batch_size=[3])
    assert_close(starts(clients, nothing)[THETA][~new], own[~new])


def test_fedalas_learn_before_they_train_and_are_judged_by_what_they_learned_last() -> None:
    clients = clients_of(FedALA(lr=0.02, share=1.0, start_epochs=1), 1)
    new, own = newcomer(clients), ZERO - 0.1 * slopes(ZERO)
    found = starts(clients, sent())
    weights = (1 - 0.02 * slopes(SENT) * (SENT - own)).clamp(0, 1)
    weights = torch.where(new.unsqueeze(1), 1.0, weights)
    assert ((weights > 0) & (weights < 1)).any()
    assert_close(found[f"{OWN}weights.{THETA}"], weights)
    assert_close(found[THETA], torch.where(new.unsqueeze(1), SENT, own + weights * (SENT - own)))
    assert torch.equal(clients.judged(IDS, sent())[THETA], SENT)  # nothing has been kept of that
    trained = TensorDict({THETA: ZERO}, batch_size=[3])
    clients.outer_method.keep(clients, IDS, found, trained)
    assert_close(clients.judged(IDS, sent())[THETA], weights * SENT)
    kept = clients.outer_method.kept(clients, IDS, sent())
    assert kept["times"].tolist() == (2 - new.long()).tolist()
