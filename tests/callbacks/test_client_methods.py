"""Who says what clients minimise: the server callback or the client module."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pflight.callbacks import APFL, Ditto, FedAvg, FedEC, FedProx, FeSEM, Reptile, ServerCallback
from pflight.errors import ConfigurationError
from pflight.method import ClientMethod
from pflight.models import Classifier, ElasticClient, ProximalClient
from pflight.models.client_methods import Elastic, Mixed, Personal, Proximal
from tests.runs import assert_same, batchnorm_client, linear_client, run, small_data


def naming(client_method: ClientMethod) -> Classifier:
    """Return a client module that names a client method."""
    client = batchnorm_client()
    client.client_method = client_method
    return client


SAME: list[tuple[Classifier, Callable[[], ServerCallback], Callable[[], ServerCallback]]] = [
    (batchnorm_client(ElasticClient, alpha=2.0), Reptile, lambda: FedEC(alpha=2.0)),
    (batchnorm_client(ElasticClient, alpha=2.0), FedEC, lambda: FedEC(alpha=2.0)),
    (
        batchnorm_client(ElasticClient, constraint="l2"),
        FedEC,
        lambda: FedEC(constraint="l2"),
    ),
    (batchnorm_client(ElasticClient, constraint=None), FedEC, lambda: FedEC(constraint=None)),
    (
        batchnorm_client(ProximalClient, mu=0.7),
        lambda: FeSEM(2),
        lambda: FeSEM(2, mu=0.7, scaling="plain"),
    ),
    (naming(Personal(Proximal(0.7))), Ditto, lambda: Ditto(lam=0.7)),
    (naming(Personal(Mixed(0.2))), APFL, lambda: APFL(alpha=0.2)),
    (naming(Proximal(0.7)), lambda: FedProx(mu=0.7), lambda: FedProx(mu=0.7)),
]


@pytest.mark.short("client0-*", "client2-*", "client4-*", "client6-*")
@pytest.mark.parametrize(("client", "bare", "told"), SAME)
def test_without_options_of_its_own_a_callback_takes_the_clients(
    client: Classifier, bare: Callable[[], ServerCallback], told: Callable[[], ServerCallback]
) -> None:
    named = run(client, small_data(), bare(), 3)
    brought = run(batchnorm_client(), small_data(), told(), 3)
    for left, right in zip(named.server_states(), brought.server_states(), strict=True):
        assert_same(left, right)
    for i in range(6):
        assert_same(named.client_state(i), brought.client_state(i))


TWO: list[tuple[Classifier, ServerCallback, str]] = [
    (
        linear_client(ProximalClient, mu=0.5),
        FedProx(mu=0.1),
        r"FedProx has the client method Proximal\(mu=0.1, scaling='plain'\), but ProximalClient "
        r"names Proximal\(mu=0.5, scaling='plain'\)",
    ),
    (
        linear_client(ElasticClient, alpha=0.5),
        FedEC(alpha=1.0),
        r"FedEC has the client method .*alpha=1.0",
    ),
    (
        linear_client(ElasticClient),
        FedEC(constraint="l2"),
        "FedEC has the client method .*constraint='l2'",
    ),
    (
        linear_client(ElasticClient),
        FedEC(constraint=None),
        "FedEC has the client method .*constraint=None",
    ),
    (
        linear_client(ElasticClient),
        FedProx(),
        "FedProx has the client method Proximal.* ElasticClient names Ela",
    ),
    (
        linear_client(ProximalClient),
        Ditto(),
        r"Ditto has the client method Personal\(.* names Proximal\(",
    ),
    (
        naming(Personal(Mixed())),
        Ditto(),
        r"Ditto has the client method Personal\(.* names Personal\(",
    ),
    (
        naming(Elastic()),
        FeSEM(2, mu=0.1),
        r"FeSEM has the client method Proximal\(.* names Elastic\(",
    ),
]


@pytest.mark.parametrize(("client", "callback", "message"), TWO)
def test_two_different_halves_are_an_error_that_names_both(
    client: Classifier, callback: ServerCallback, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        run(client, small_data(), callback)
    assert "\n" not in str(error.value)


def test_a_half_that_a_subclass_sets_is_its_own_to_say() -> None:
    class Pulled(FedAvg):
        client_method = Proximal(0.3)

    with pytest.raises(ConfigurationError, match=r"Pulled has the client method Proximal\(mu=0.3"):
        run(linear_client(ProximalClient, mu=0.1), small_data(), Pulled())
    run(linear_client(ProximalClient, mu=0.3), small_data(), Pulled())
