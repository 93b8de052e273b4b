"""Groups of clients that change over rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pflight.data.fingerprint import checksum_of
from pflight.errors import ConfigurationError
from pflight.options import number, whole
from pflight.randomness import Purpose, generator


class GroupMoves:
    """Moves a share of the clients to other groups, in some rounds.

    Who moves is drawn from all clients, and each of them goes to any other group, with equal
    probability. Draws depend on the seed and the round alone. A client can move several times. Use
    it in the ``at_round`` of your own data module.

    Args:
        groups: The group of each client before the first move, ``[num_clients]``; groups are
            ``0 .. K - 1``.
        moves: From a round, 1 or more, to the share of the clients that move in it, in (0, 1]. They
            train in this round on data of their new group.
        seed: Seed of all draws.

    Raises:
        ConfigurationError: If there is only one group, or a round or share is out of range.

    Example:
        >>> moves = GroupMoves(torch.tensor([0, 0, 1, 1]), {3: 0.25})
        >>> [int((moves.at(round) != moves.at(0)).sum()) for round in (2, 3, 9)]
        [0, 1, 1]
    """

    def __init__(self, groups: Tensor, moves: Mapping[int, float], seed: int = 0) -> None:
        check_moves(moves)
        clients, num_groups = len(groups), int(groups.max()) + 1
        if moves and num_groups < 2:
            raise ConfigurationError("moves need two groups of clients or more, but there is one")
        self._by_round = {0: groups}
        for round, share in sorted(moves.items()):
            count = math.floor(share * clients + 0.5)
            if not count:
                raise ConfigurationError(
                    f"moves: a share of {share} of {clients} clients is none in round {round}"
                )
            random = generator(Purpose.PARTITION, seed, 6, round)
            who = torch.randperm(clients, generator=random)[:count]
            steps = torch.randint(1, max(num_groups, 2), (count,), generator=random)
            groups = groups.clone()
            groups[who] = (groups[who] + steps.to(groups)) % num_groups
            self._by_round[round] = groups

    def at(self, round: int) -> Tensor:
        """Return the group of each client in a round, ``[num_clients]``."""
        return self._by_round[max(begin for begin in self._by_round if begin <= round)]

    def checksum(self) -> Tensor:
        """Return a number for each client that changes with its groups, for ``fingerprint()``."""
        begun = torch.tensor([*self._by_round])
        stays = torch.stack([*self._by_round.values()], dim=1).cpu().long()
        return torch.tensor([checksum_of(torch.cat([begun, own])) for own in stays])


def check_moves(moves: Mapping[int, float]) -> None:
    """Raise unless these are shares of clients by round.

    Raises:
        ConfigurationError: Naming the round.
    """
    for round, share in moves.items():
        if not whole(round) >= 1:
            raise ConfigurationError(f"moves: rounds are whole numbers from 1, got {round!r}")
        if not 0 < number(share) <= 1:
            raise ConfigurationError(
                f"moves: the share of clients of round {round} must be in (0, 1], got {share!r}"
            )
