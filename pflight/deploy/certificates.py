"""The certificates of a server and the keys of its nodes: how they are made and checked."""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trustme
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pflight.errors import ConfigurationError
from pflight.runs.files import replacing

from .flower import public_key_to_bytes


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Write the certificates of an authority and of a server.

    An existing authority in the folder is kept. Then nodes keep their ``ca.pem``.

    Args:
        folder: Gets ``ca.pem`` for nodes, ``ca.key``, ``server.pem`` and ``server.key``.
        hosts: Names and addresses of the server, as nodes reach it.
        days: Days until the server's certificate expires.

    Raises:
        ConfigurationError: If the authority's key or certificate is missing, a host is invalid,
            or the folder is not writable. Then nothing is written.
    """
    root, key = folder / "ca.pem", folder / "ca.key"
    if root.exists() != key.exists():
        missing = key if root.exists() else root
        raise ConfigurationError(f"{folder} has no {missing.name}: put it back, or start anew")
    is_new = not root.exists()
    if is_new:
        authority = trustme.CA(organization_name="pflight")
    else:
        check_pair(root, key)
        authority = trustme.CA.from_pem(root.read_bytes(), key.read_bytes())
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    names = [*dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    try:
        server = authority.issue_cert(*names, not_after=end)
    except ValueError as error:
        raise ConfigurationError(f"--host: no server has such a name: {error}") from error
    make_folder(folder)
    if is_new:
        write_private(key, authority.private_key_pem.bytes())
        authority.cert_pem.write_to_path(str(root))
    write_private(folder / "server.key", server.private_key_pem.bytes())
    chain = b"".join(part.bytes() for part in server.cert_chain_pems)
    (folder / "server.pem").write_bytes(chain)


def make_key(path: Path) -> Path:
    """Write a node's private key to a file, and its public key to a ``.pub`` file.

    Returns:
        The file of the public key.

    Raises:
        ConfigurationError: If a key already exists.
    """
    if path.exists():
        raise ConfigurationError(f"{path} exists: a node keeps its key, by which it is known")
    make_folder(path.parent)
    key = ec.generate_private_key(ec.SECP384R1())
    pem, ssh = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    write_private(path, key.private_bytes(pem, ssh, serialization.NoEncryption()))
    public = path.with_suffix(".pub")
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(*openssh) + b"\n")
    return public


def node_key(path: Path) -> bytes:
    """Return a node's public key in Flower's format.

    Raises:
        ConfigurationError: If the file holds no such key.
    """
    load = serialization.load_ssh_public_key
    return bytes(public_key_to_bytes(_read_key(path, load, ec.EllipticCurvePublicKey, "public")))


def check_private_key(path: Path) -> None:
    """Raise unless a file holds a node's private key.

    Raises:
        ConfigurationError: If the key is missing or unreadable.
    """
    load = partial(serialization.load_ssh_private_key, password=None)
    _read_key(path, load, ec.EllipticCurvePrivateKey, "private")


def _read_key(path: Path, load: Callable[[bytes], Any], kind: type, what: str) -> Any:
    try:
        key = load(path.read_bytes())
        if not isinstance(key, kind):
            raise ValueError(f"{type(key).__name__}, where an elliptic curve is wanted")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"{path} is not the {what} key of a node: {error}") from error
    return key


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


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically. Only its owner can read it."""
    with replacing(path) as temporary:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(content)


def run(given: argparse.Namespace) -> None:
    """Make the certificates of a server, or the key of a node.

    Args:
        given: The options of ``pflight deploy certificates``.
    """
    if given.key is not None:
        public = make_key(given.folder / f"{given.key}.key")
        print(f"pflight: the node keeps {public.with_suffix('.key')}, its server needs {public}")
        return
    make_certificates(given.folder, given.host, given.days)
    (given.folder / "nodes").mkdir(exist_ok=True)
    print(
        f"pflight: nodes need {given.folder / 'ca.pem'}; put their public keys, *.pub, into "
        f"{given.folder / 'nodes'}"
    )


def make_folder(folder: Path) -> None:
    """Make a folder unless it exists.

    Raises:
        ConfigurationError: If the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror
        raise ConfigurationError(f"{folder} is no folder to write to: {reason}") from error


def check_pair(certificate: Path, key: Path) -> None:
    """Raise unless two files hold a certificate and its private key.

    Raises:
        ConfigurationError: If they don't. The message names the files.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=bytes)
    except OSError as error:  # includes TLS errors
        reason = error.strerror if error.filename else getattr(error, "reason", None) or error
        raise ConfigurationError(
            f"{certificate} and {key} are no certificate and its key: {reason}"
        ) from error


def trusting(root: Path) -> ssl.SSLContext:
    """Return a TLS context that trusts only one authority.

    Args:
        root: The certificate of the authority.

    Raises:
        ConfigurationError: If the file holds no certificate.
    """
    try:
        root.read_bytes()
        return ssl.create_default_context(cafile=str(root))
    except OSError as error:  # includes TLS errors
        reason = error.strerror if error.filename else "it has no certificate"
        raise ConfigurationError(f"{root} is not the server's ca.pem: {reason}") from error


def check_name(address: str) -> None:
    """Raise unless the host of an address can be resolved.

    Raises:
        ConfigurationError: If it can't. The message names the host.
    """
    host = _parted(address)[0]
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"the host {host} can't be found: {error.args[-1]}") from error


def _parted(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_server(address: str, root: Path) -> bool:
    """Return whether a server answers at an address.

    Raises:
        ConfigurationError: If the server can't prove its identity with the certificate.
    """
    context, there = trusting(root), _parted(address)
    try:
        with socket.create_connection(there, timeout=10) as plain:
            context.wrap_socket(plain, server_hostname=there[0]).close()
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            f"the server at {address} can't be trusted: {error.verify_message}; check {root} and "
            "the server's certificate"
        ) from error
    except ssl.SSLEOFError:  # from a proxy whose server is down
        return False
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"what answers at {address} does not speak TLS ({error.reason}): check the address"
        ) from error
    except OSError:
        return False
    return True
