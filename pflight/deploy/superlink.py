"""Flower's SuperLink, its run, and the messages to its nodes."""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

import httpx
from flwr.app import Message, RecordDict

from pflight.errors import ConfigurationError, described
from pflight.runs.locks import hold, release

from .certificates import check_server, write_private
from .flower import (
    LOOK,
    ControlHttpClient,
    HttpGrid,
    ObjectPullError,
    ObjectTree,
    Owner,
    arrived,
    bytes_of,
    pull_message,
    register_node,
    start_run,
)
from .link import SECRET, SOCKET
from .messages import tensor_bytes_of
from .processes import Process
from .remote import Asked
from .request import Work

_KINDS = {"describe": "query", "losses": "evaluate", "evaluate": "evaluate"}  # others are "train"
_LONGEST = 12 * 3600.0  # seconds until a message expires without round_timeout
_OVER = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})  # the run has ended


@contextmanager
def superlink(
    host: str, port: int, certificates: Path, timeout: float | None, patience: float
) -> Iterator[GridPost]:
    """Start a SuperLink for a run, and yield the carrier of messages to its nodes.

    Args:
        host: The address to listen at.
        port: The port to listen at.
        certificates: The folder with ``ca.pem``, ``server.pem`` and ``server.key``, also for logs.
        timeout: As in :class:`GridPost`.
        patience: Likewise.

    Raises:
        ConfigurationError: If the SuperLink can't be started.
    """
    logs = certificates / "superlink" / str(port)  # other ports have other servers
    logs.mkdir(parents=True, exist_ok=True)
    for own in (logs.parent, logs):
        own.chmod(0o700)
    try:
        lock = hold(logs / ".lock")
    except BlockingIOError as error:
        raise ConfigurationError(f"another server is running in {logs}") from error
    print(f"pflight: starting Flower's SuperLink at {host}:{port}, log in {logs}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pflight-") as place:  # only the owner can enter
        folder = Path(place)
        write_private(folder / SECRET, secret := secrets.token_hex(32).encode())
        module = [sys.executable, "-m", "pflight.deploy.link", host, str(port)]
        process = Process([*module, str(certificates), place], logs, "superlink")
        owner, outside = Owner(folder / SOCKET), address_of(host, port)
        try:
            process.wait_until(lambda: check_server(outside, certificates / "ca.pem"))
            with owner.control() as control, owner.acting(secret, start_run(control)) as grid:
                give_up_with(grid, process)
                yield GridPost(grid, timeout, patience, control)
        except httpx.HTTPError as error:
            process.check()
            raise ConfigurationError(
                f"{process.name} does not do what it is asked: {described(error)} (see "
                f"{process.log})"
            ) from error
        finally:
            process.stop()
            release(lock)


def address_of(host: str, port: int) -> str:
    """Return an address for processes on this machine to reach a host and port."""
    name = "localhost" if host in ("0.0.0.0", "::", "127.0.0.1") else host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def give_up_with(grid: HttpGrid, process: Process) -> None:
    """Stop a grid's endless retries once its SuperLink or the run has ended.

    Args:
        grid: The grid of Flower.
        process: The process of the SuperLink.
    """
    invoker = grid._retry_invoker
    gives_up = invoker.should_giveup

    def should_give_up(error: Exception) -> bool:
        process.check()
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _OVER:
            raise ConfigurationError("Flower's SuperLink has ended the run, or it was stopped")
        return gives_up is not None and gives_up(error)

    invoker.should_giveup = should_give_up


class GridPost:
    """Carries messages over Flower's grid.

    Args:
        grid: The grid of Flower.
        timeout: Seconds until a client must have answered, or ``None``.
        patience: Likewise, before the first round.
        control: The control API of the SuperLink.

    Attributes:
        keys: The nodes' public keys, by client.
        carried: By kind of work, the number of sent messages, the bytes of their contents and of
            the answers as Flower sends them, and the bytes around tensors.
    """

    def __init__(
        self, grid: HttpGrid, timeout: float | None, patience: float, control: ControlHttpClient
    ) -> None:
        self.grid, self.control = grid, control
        self.timeout, self.patience = timeout, patience
        self.keys: dict[int, bytes] = {}
        self.carried: dict[Work, Counter[str]] = defaultdict(Counter)
        self._waiting: dict[int, tuple[str, float, float, Work]] = {}
        self._arrived: dict[int, ObjectTree] = {}
        self._lost: dict[int, str] = {}
        self._registered: set[bytes] = set()

    def online(self) -> dict[int, int]:
        """Return Flower's ids of the nodes that are connected, by client."""
        found = {node.public_key: node.node_id for node in self.grid.get_nodes()}
        return {client: found[key] for client, key in self.keys.items() if key in found}

    def register(self, keys: Set[bytes]) -> None:
        """Let the nodes with these keys connect.

        No node is ever unregistered, since Flower accepts a key only once. A node that may not
        take part any more gets no messages.
        """
        for key in keys - self._registered:
            register_node(self.control, key)
            self._registered.add(key)

    def send(self, messages: Iterable[Asked]) -> None:
        """See :class:`~pflight.deploy.remote.Post`."""
        online, letters, whose = self.online(), [], list[tuple[Asked, float]]()
        for asked in messages:
            self._waiting.pop(asked.client, None)
            self._arrived.pop(asked.client, None)
            if asked.client not in online:
                self._lost[asked.client] = "its node is not connected"
                continue
            kind, node = _KINDS.get(asked.work, "train"), online[asked.client]
            timeout = self.patience if asked.work == "describe" else self.timeout or _LONGEST
            ttl, group = timeout + 60, str(asked.round)
            letters.append(Message(asked.content, node, kind, ttl=ttl, group_id=group))
            whose.append((asked, timeout))
            self.carried[asked.work]["messages"] += 1
            self._count(asked.work, "down", asked.content)
        now = time.monotonic()
        ids = self.grid.push_messages(letters) if letters else []
        for (asked, timeout), id_ in zip(whose, ids, strict=True):
            if id_:
                self._waiting[asked.client] = id_, now + timeout, timeout, asked.work
            else:
                self._lost[asked.client] = "Flower did not take the message for its node"

    def _count(self, work: Work, way: str, content: RecordDict) -> None:
        whole = bytes_of(content)
        self.carried[work].update({way: whole, f"around {way}": whole - tensor_bytes_of(content)})

    def receive(self, client: int) -> RecordDict | str:
        """See :class:`~pflight.deploy.remote.Post`."""
        if client not in self._waiting:
            return self._lost.pop(client)
        _, end, timeout, work = self._waiting[client]
        while client not in self._arrived:
            late = time.monotonic() > end
            self._look()
            if late:
                break
            if client not in self._arrived:
                time.sleep(LOOK)
        del self._waiting[client]
        tree = self._arrived.pop(client, None)
        if tree is None:
            return f"its node did not answer within {timeout:g} s"
        try:
            run_id, runtime = self.grid.run.run_id, self.grid._runtime_client
            message = pull_message(self.grid.node, run_id, runtime, tree, end)
            if message.has_error():
                return f"its node gave no answer: {message.error.reason}"
            self._count(work, "up", message.content)
        except ObjectPullError:
            whole = "its node did not send its answer as a whole"
            late = time.monotonic() >= end
            return f"{whole} within {timeout:g} s" if late else whole
        except (ConfigurationError, httpx.HTTPError):  # from the SuperLink, not from the node
            raise
        except Exception as error:  # Flower raises any kind for malformed messages
            return f"its node sent an answer that Flower can't read: {described(error)}"
        return message.content

    def _look(self) -> None:
        """Note which answers have arrived, without their contents."""
        whose = {
            id_: client
            for client, (id_, *_) in self._waiting.items()
            if client not in self._arrived
        }
        for id_, tree in arrived(self.grid, whose).items():
            self._arrived[whose[id_]] = tree
