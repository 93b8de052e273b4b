"""Checks of the states that a client method makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from tensordict import TensorDict
from torch import Tensor

from pflight.errors import ConfigurationError

from .state import StateLayout, entries


def made(
    what: str,
    layout: StateLayout,
    clients: Tensor,
    make: Callable[[], TensorDict],
    given: TensorDict,
    also: Iterable[Tensor] = (),
) -> TensorDict:
    """Return the full states ``[C]`` that a client method makes.

    Args:
        what: What of the client method, for messages.
        layout: The layout of the states.
        clients: Ids ``[C]``.
        make: Returns the states. Own entries may be among them that the layout does not have.
        given: States that it may not change in place, since they may be views of the server's
            models or of memory.
        also: Tensors that it may not change either.

    Raises:
        ConfigurationError: If it changes these, or returns no full states.
    """
    leaves = chain((leaf for _, leaf in entries(given)), also)
    before = [(leaf, leaf._version) for leaf in leaves if not leaf.is_inference()]
    states = make()
    if any(leaf._version != version for leaf, version in before):
        raise ConfigurationError(
            f"{what} changes tensors in place: it has to replace entries of the states"
        )
    if not isinstance(states, TensorDict) or states.batch_size != clients.shape:
        found = type(states).__name__
        if isinstance(states, TensorDict):
            found = f"one of batch size {[*states.batch_size]}"
        raise ConfigurationError(
            f"{what} has to return a TensorDict of batch size {[len(clients)]}, a stack of full "
            f"states, got {found}"
        )
    if lacking := sorted({*layout.names} - {*states.keys()}):
        raise ConfigurationError(f"{what} returns states that lack {lacking[0]!r}")
    known = {*layout.names, *given.keys()}
    if unknown := [name for name in {*states.keys()} - known if not name.startswith("pflight_")]:
        raise ConfigurationError(
            f"{what} returns states that have {unknown[0]!r}{called(unknown[0], layout)}"
        )
    return states


def called(name: str, layout: StateLayout) -> str:
    """Return a hint for the name of an own entry that lacks its prefix, else nothing."""
    own = next((own for own in layout.own if own.endswith(f".{name}")), None)
    return "" if own is None else f": in a state it is {own!r}"
