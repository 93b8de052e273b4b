from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pflight.data.cohort import CohortLoader, CohortSampler
from pflight.errors import ConfigurationError


def sampler(num_clients: int = 10, **options) -> CohortSampler:
    return CohortSampler(torch.arange(num_clients), torch.ones(num_clients), **options)


@pytest.mark.parametrize(
    ("num_clients", "rate", "size"),
    [(10, 0.25, 3), (10, 0.24, 2), (10, 0.01, 1), (10, 1.0, 10), (3, 0.5, 2), (5, 0.1, 1)],
)
def test_participation_is_rounded_half_up_and_at_least_one(num_clients, rate, size):
    cohorts = sampler(num_clients, participation=rate)
    assert cohorts.size == size == len(cohorts.sample(0))


@given(
    clients=st.sets(st.integers(0, 500), min_size=1, max_size=40),
    share=st.floats(0.01, 1),
    sampling=st.sampled_from(["uniform", "samples"]),
    availability=st.floats(0.01, 1),
    dropout=st.floats(0, 0.99),
    seed=st.integers(0, 2**31),
    round=st.integers(0, 10_000),
)
def test_a_cohort_is_a_set_of_its_clients_and_one_answers(
    clients, share, sampling, availability, dropout, seed, round
):
    ids = torch.tensor(sorted(clients))
    cohorts = CohortSampler(
        ids,
        ids + 1,
        participation=share,
        sampling=sampling,
        availability=availability,
        dropout=dropout,
        seed=seed,
    )
    cohort = cohorts.sample(round)
    assert cohort.dtype == torch.int64
    assert 1 <= len(cohort) <= cohorts.size
    assert set(cohort.tolist()) <= clients
    assert cohort.tolist() == sorted(set(cohort.tolist()))
    answers = cohorts.answers(round, cohort)
    assert answers.dtype == torch.bool
    assert answers.shape == cohort.shape
    assert answers.any()


def test_all_clients_take_part_and_answer_by_default():
    cohorts = sampler(7)
    assert cohorts.sample(3).tolist() == list(range(7))
    assert cohorts.answers(3, cohorts.sample(3)).all()


def test_draws_depend_on_seed_and_round_only():
    first, second = sampler(100, size=10, seed=1), sampler(100, size=10, seed=1)
    for _ in range(3):
        second.sample(5)
    assert torch.equal(first.sample(4), second.sample(4))
    assert not torch.equal(first.sample(4), first.sample(5))
    assert not torch.equal(first.sample(4), sampler(100, size=10, seed=2).sample(4))


def test_uniform_sampling_takes_every_client_equally_often():
    cohorts = sampler(10, size=3)
    taken = torch.cat([cohorts.sample(round) for round in range(2000)]).bincount(minlength=10)
    # 600 expected, standard deviation 20.5
    assert taken.sum() == 6000
    assert (taken - 600).abs().max() < 100


def test_sampling_by_samples_follows_successive_draws():
    sizes = torch.tensor([1.0, 2.0, 7.0])
    cohorts = CohortSampler(torch.arange(3), sizes, size=2, sampling="samples")
    rounds = 3000
    taken = torch.cat([cohorts.sample(round) for round in range(rounds)]).bincount(minlength=3)
    share = sizes / sizes.sum()
    expected = share.clone()
    for i in range(3):
        for first in range(3):
            if first != i:
                expected[i] += share[first] * share[i] / (1 - share[first])
    torch.testing.assert_close(taken / rounds, expected, atol=0.04, rtol=0)


def test_unavailable_clients_are_left_out():
    cohorts = sampler(1000, availability=0.3)
    counts = [len(cohorts.sample(round)) for round in range(20)]
    assert len(set(counts)) > 1
    assert abs(sum(counts) / 20 - 300) < 20
    assert len(sampler(2, availability=1e-9).sample(0)) == 1


def test_dropout_decides_each_client_by_itself():
    cohorts = sampler(1000, dropout=0.2)
    everyone = torch.arange(1000)
    answers = cohorts.answers(0, everyone)
    assert abs(int(answers.sum()) - 800) < 60
    some = torch.cat([everyone[::7], everyone[:1]])
    assert torch.equal(cohorts.answers(0, some), answers[some])
    assert torch.equal(
        torch.cat([cohorts.answers(0, client) for client in everyone.split(1)]), answers
    )
    assert not torch.equal(cohorts.answers(1, everyone), answers)


def test_one_answers_though_all_would_drop_out():
    cohorts = sampler(5, dropout=1 - 1e-12)
    assert all(int(cohorts.answers(round, torch.arange(5)).sum()) == 1 for round in range(20))
    assert len(cohorts.answers(0, torch.empty(0, dtype=torch.long))) == 0


def test_it_is_one_of_the_cohort_whoever_else_takes_part():
    cohorts, everyone = sampler(9, size=3, dropout=1 - 1e-12), torch.arange(9)
    for round in range(20):
        answers = cohorts.answers(round, everyone)
        assert int(answers.sum()) == 1
        assert everyone[answers] in cohorts.sample(round)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"size": 0}, "cohort_size"),
        ({"size": 11}, "cohort_size"),
        ({"size": 2, "participation": 0.5}, "cohort_size or participation"),
        ({"participation": 0.0}, "participation"),
        ({"participation": 1.5}, "participation"),
        ({"participation": float("nan")}, "participation"),
        ({"sampling": "weighted"}, "sampling"),
        ({"availability": 0.0}, "availability"),
        ({"availability": 1.1}, "availability"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
    ],
)
def test_bad_options_are_named(options, name):
    with pytest.raises(ConfigurationError, match=name):
        sampler(**options)


def test_no_clients_is_an_error():
    with pytest.raises(ConfigurationError, match="no client can train"):
        CohortSampler(torch.empty(0), torch.empty(0))


def test_unsorted_clients_keep_their_sample_counts():
    cohorts = CohortSampler(
        torch.tensor([9, 4]), torch.tensor([1.0, 1e9]), size=1, sampling="samples"
    )
    assert all(cohorts.sample(round).tolist() == [4] for round in range(20))


def test_the_loader_yields_the_cohort_of_its_round():
    cohorts = sampler(50, size=5)
    loader = CohortLoader(cohorts)
    assert len(loader) == len(list(loader)) == 1
    for round in (0, 3):
        loader.round = round
        assert torch.equal(next(iter(loader)), cohorts.sample(round))
