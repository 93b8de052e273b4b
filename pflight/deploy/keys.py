"""The keys that identify nodes."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)

from pflight.errors import ConfigurationError

from .flower import public_key_to_bytes


def node_key(path: Path) -> bytes:
    """Return a node's public key in Flower's format.

    Raises:
        ConfigurationError: If the file holds no such key.
    """
    try:
        key = load_ssh_public_key(path.read_bytes())
        if not isinstance(key, EllipticCurvePublicKey):
            raise ValueError(f"{type(key).__name__}, where an elliptic curve is wanted")
        return public_key_to_bytes(key)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"{path} is not the public key of a node: {error}") from error


def check_private_key(path: Path) -> None:
    """Raise unless a file holds a node's private key.

    Raises:
        ConfigurationError: If the key is missing or unreadable.
    """
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, EllipticCurvePrivateKey):
            raise ValueError(f"{type(key).__name__}, where an elliptic curve is wanted")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"{path} is not the private key of a node: {error}") from error


def keys_in(folder: Path) -> dict[str, bytes]:
    """Return the nodes' public keys by file name, in the order of the clients' ids.

    Raises:
        ConfigurationError: If there are no keys, a key is unreadable, or two keys are equal.
    """
    keys = {path.name: node_key(path) for path in sorted(folder.glob("*.pub"))}
    if not keys:
        raise ConfigurationError(f"there is no node's public key, *.pub, in {folder}")
    names: dict[bytes, str] = {}
    for name, key in keys.items():
        if (other := names.setdefault(key, name)) != name:
            raise ConfigurationError(f"{other} and {name} in {folder} are one and the same key")
    return keys
