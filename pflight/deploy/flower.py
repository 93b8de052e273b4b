"""Flower's SuperLink, SuperNodes and messages; nearly all that pflight uses of Flower is here."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import httpx
from filelock import FileLock, Timeout
from flwr.app import Context, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    RegisterNodeRequest,
    StartRunRequest,
)
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from pflight.errors import ConfigurationError, described

from .certificates import check_server, write_private
from .messages import bytes_of, tensor_bytes_of
from .processes import Process, free_port
from .remote import Asked
from .request import Work

APP = """\
[project]
name = "pflight-federation"
version = "1.0.0"
description = "A federation of pflight, whose code is installed on all machines"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "pflight"

[tool.flwr.app.components]
serverapp = "pflight.deploy.app:server"
clientapp = "pflight.deploy.app:client"
"""
"""A Flower app that carries no code: both sides run what they have installed."""
_KINDS = {
    "describe": "query",
    "train": "train",
    "gradients": "train",
    "aside": "train",
    "losses": "evaluate",
    "evaluate": "evaluate",
}
_LOOK = 0.2  # seconds from one look at what has arrived to the next
_START = 120.0  # seconds in which a process of Flower's starts
_LONGEST = 12 * 3600.0  # seconds for which a message is kept without a round_timeout
_LOST = (
    b"SSL/TLS handshake error detected"  # the last words of a SuperNode, which does not end then
)
_OVER = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})  # for a run that has ended
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


class LostServerError(ConfigurationError):
    """A SuperNode has lost its server."""


class Authority:
    """A certificate authority, by which connections are trusted.

    Args:
        root: Its certificate, PEM.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def runtime(
        self, address: str, secret: bytes | None = None, token: str = ""
    ) -> RuntimeHttpClient:
        """Return a connection to a runtime: of a SuperLink, or of a SuperNode.

        Args:
            address: Of the runtime.
            secret: What only the executor of tasks knows, to acquire one.
            token: Of a task, to work on it.
        """
        interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="pflight")]
        if secret is not None:
            auth = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)
            interceptors.append(auth)
        if token:
            interceptors.append(RuntimeTokenHttpInterceptor(token))
        return RuntimeHttpClient.from_server_address(address, False, str(self.root), interceptors)

    def control(self, address: str) -> ControlHttpClient:
        """Return a connection to a SuperLink's control."""
        interceptors = [RuntimeVersionHttpInterceptor(component_name="pflight")]
        return ControlHttpClient.from_server_address(address, False, str(self.root), interceptors)


@contextmanager
def superlink(
    host: str, port: int, certificates: Path, timeout: float | None, patience: float
) -> Iterator[GridPost]:
    """Start a SuperLink for a run; yield what carries messages to its nodes.

    Args:
        host: Where it listens.
        port: Likewise.
        certificates: With ``ca.pem``, ``server.pem`` and ``server.key``; it keeps its things there.
        timeout: As in :class:`GridPost`.
        patience: Likewise.

    Raises:
        ConfigurationError: If it can't be started.
    """
    folder = certificates / "superlink" / str(port)  # there may be another server
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise ConfigurationError(f"another server is running in {folder}") from error
    database = folder / "superlink.db"
    for kept in folder.glob(f"{database.name}*"):  # nodes, runs and messages of the server before
        kept.unlink()
    write_private(folder / "secret", secret := secrets.token_hex(32).encode())
    print(f"pflight: starting flower-superlink at {host}:{port}, log in {folder}", flush=True)
    command = ["flower-superlink", "--host", host, "--port", str(port), "--isolation", "process"]
    command += ["--ssl-ca-certfile", str(certificates / "ca.pem")]
    command += ["--ssl-certfile", str(certificates / "server.pem")]
    command += ["--ssl-keyfile", str(certificates / "server.key")]
    command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    command += ["--database", str(database)]
    command += ["--superexec-auth-secret-file", str(folder / "secret")]
    process, authority = Process(command, folder, "superlink"), Authority(certificates / "ca.pem")
    address = address_of(host, port)
    try:
        process.wait_until(lambda: check_server(address, certificates / "ca.pem"))
        with (
            authority.control(address) as control,
            _task(authority, address, secret, start_run(control)) as grid,
        ):
            give_up_with(grid, process)
            yield GridPost(grid, timeout, patience, control)
    except httpx.HTTPError as error:
        process.check()
        raise ConfigurationError(
            f"{process.name} does not do what it is asked: {described(error)} (see {process.log})"
        ) from error
    finally:
        process.stop()
        lock.release()


def address_of(host: str, port: int) -> str:
    """Return the address by which a process on this machine reaches what listens there."""
    name = "localhost" if host in ("0.0.0.0", "::", "127.0.0.1") else host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def start_run(control: ControlHttpClient, app: str = APP) -> int:
    """Have a SuperLink run an app, which is the text of its ``pyproject.toml``; return its id."""
    content, _ = build_fab_from_files({"pyproject.toml": app.encode()})
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    return int(control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id)


def give_up_with(grid: HttpGrid, process: Process | None = None) -> None:
    """Have a grid, which tries for ever to reach its SuperLink, end with it or with the run.

    Args:
        grid: Flower's.
        process: The SuperLink, if it was started here.
    """
    invoker = grid._retry_invoker
    gives_up = invoker.should_giveup

    def should_give_up(error: Exception) -> bool:
        if process is not None:
            process.check()
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _OVER:
            raise ConfigurationError("Flower's SuperLink has ended the run, or it was stopped")
        return gives_up is not None and gives_up(error)

    invoker.should_giveup = should_give_up


class Heartbeat:
    """Tells Flower that a task goes on; unlike Flower's own, it never interrupts the process.

    As a context manager it does so until the end.

    Args:
        client: The connection to the task's runtime.
        every: Seconds from one to the next, of which Flower misses five.
    """

    def __init__(self, client: RuntimeHttpClient, every: float = 10.0) -> None:
        self._client, self._every, self._done = client, every, Event()
        self._thread = Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _beat(self) -> None:
        while True:
            with suppress(httpx.HTTPError):  # who sends or asks next sees that Flower is gone
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            if self._done.wait(self._every):
                return

    def stop(self) -> None:
        """End it."""
        self._done.set()
        self._thread.join()


@contextmanager
def _task(authority: Authority, address: str, secret: bytes, run_id: int) -> Iterator[HttpGrid]:
    """Be the process of a run's server, and yield the grid of its nodes."""
    end, token = time.monotonic() + _START, ""
    with authority.runtime(address, secret) as executor:
        request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        while not token:
            acquired = executor.AcquireTask(request)
            if acquired.token and acquired.task.run_id == run_id:
                token = acquired.token
            elif time.monotonic() > end:
                raise ConfigurationError("the SuperLink did not start the run")
            else:
                time.sleep(_LOOK)
    with authority.runtime(address, token=token) as client:
        status = SubStatus.FAILED
        try:
            with Heartbeat(client):
                given = client.PullTaskInput(PullTaskInputRequest())
                run = run_from_proto(given.run)
                TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, run.run_id
                TaskIdentity.node_id = given.context.node_id
                root = authority.root.read_bytes()
                with closing(HttpGrid(address, False, root, token=token)) as grid:
                    grid.set_run(run)
                    yield grid
            status = SubStatus.COMPLETED
        finally:
            with suppress(httpx.HTTPError):
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))


class GridPost:
    """Carries messages over Flower's grid.

    Args:
        grid: Flower's.
        timeout: Seconds in which a client has to answer, or ``None``.
        patience: Likewise, before the first round.
        control: Of the SuperLink; ``None`` if others say who may connect.

    Attributes:
        keys: The nodes' public keys, by client.
        carried: By kind of work, the messages that were sent, the bytes of their contents and of
            the answers' as Flower sends them, and those that are around tensors.
    """

    def __init__(
        self,
        grid: HttpGrid,
        timeout: float | None,
        patience: float,
        control: ControlHttpClient | None = None,
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

        None is let out again, since Flower takes no key a second time: who may not take part any
        more is sent nothing.
        """
        if self.control is None:
            return
        for key in keys - self._registered:
            self.control.RegisterNode(RegisterNodeRequest(public_key=key))
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
            kind, node = _KINDS[asked.work], online[asked.client]
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
                time.sleep(_LOOK)
        del self._waiting[client]
        tree = self._arrived.pop(client, None)
        nothing = f"its node did not answer within {timeout:g} s"
        if tree is None:
            return nothing
        try:
            message = self._pulled(tree, end)
            if message.has_error():
                return f"its node gave no answer: {message.error.reason}"
            self._count(work, "up", message.content)
        except ObjectPullError:
            whole = "its node did not send its answer as a whole"
            return whole if time.monotonic() < end else nothing
        except (ConfigurationError, httpx.HTTPError):  # of the SuperLink, not of the node
            raise
        except Exception as error:  # whatever Flower raises as it unpacks what a node has made up
            return f"its node sent an answer that Flower can't read: {described(error)}"
        return message.content

    def _look(self) -> None:
        """Note whose answers have come, whoever is waited for; what they carry stays there."""
        whose = {
            id_: client
            for client, (id_, *_) in self._waiting.items()
            if client not in self._arrived
        }
        found = self._runtime.PullMessages(PullAppMessagesRequest(message_ids=[*whose]))
        for letter, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            self._arrived[whose[letter.metadata.reply_to_message_id]] = tree

    def _pulled(self, tree: ObjectTree, end: float) -> Message:
        return _pulled_as(self.grid.node, self.grid.run.run_id, self._runtime, tree, end)

    @property
    def _runtime(self) -> RuntimeHttpClient:
        return self.grid._runtime_client


@contextmanager
def supernode(
    folder: Path, address: str, root: Path, key: Path, own: Mapping[str, Path], secret: Path
) -> Iterator[tuple[Process, str]]:
    """Start a SuperNode; yield its process and the address of its runtime.

    Args:
        folder: Where it keeps its things.
        address: Of the server.
        root: Certificate of the authority that the server is trusted by.
        key: The node's private key.
        own: Certificates for what the SuperNode and this process say to each other.
        secret: A file with what both of them know.

    Raises:
        ProcessEndedError: If it ends at once, as when another process takes its port meanwhile.
    """
    port = free_port()
    command = ["flower-supernode", "--superlink", address, "--root-certificates", str(root)]
    command += ["--auth-supernode-private-key", str(key), "--isolation", "process"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--ssl-ca-certfile", str(own["ca"]), "--ssl-certfile", str(own["certificate"])]
    command += ["--ssl-keyfile", str(own["key"]), "--superexec-auth-secret-file", str(secret)]
    process, runtime = Process(command, folder, "supernode"), f"127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return check_server(runtime, own["ca"])
        except ConfigurationError:  # what answers was faster to take the port: this one ends
            return False

    try:
        process.wait_until(ready)
        yield process, runtime
    finally:
        process.stop()


def serve(
    answer: Callable[[RecordDict], RecordDict],
    process: Process,
    authority: Authority,
    address: str,
    secret: bytes,
    lost: Callable[[], bool],
) -> None:
    """Answer the messages that come to a SuperNode, until it ends.

    The code that Flower sends along with a run is neither installed nor looked at.

    Args:
        answer: Gives the answer to a message.
        process: The SuperNode.
        authority: By which its runtime is trusted.
        address: Of its runtime.
        secret: Which lets this process take messages.
        lost: Says whether the server was not there for long.

    Raises:
        LostServerError: When it has lost its server.
        ProcessEndedError: When it has ended, with what it said.
    """
    with authority.runtime(address, secret) as executor:  # for which an ending SuperNode waits
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        letters: SimpleQueue[Letter] = SimpleQueue()
        while True:
            process.check()
            if process.has_written(_LOST) or lost():
                raise LostServerError(f"{process.name} has lost the server")
            with suppress(httpx.HTTPError):  # it is about to end
                acquired = executor.AcquireTask(request)
                if acquired.token:
                    client = authority.runtime(address, token=acquired.token)
                    Thread(target=_open, args=(client, letters), daemon=True).start()
            with suppress(Empty):
                _answer(letters.get(timeout=_LOOK), answer)


class Letter(NamedTuple):
    """A message that has arrived as a whole, and what its answer needs."""

    message: Message
    context: Context
    client: RuntimeHttpClient
    heartbeat: Heartbeat


def _answer(letter: Letter, answer: Callable[[RecordDict], RecordDict]) -> None:
    """Answer a message that has arrived."""
    TaskIdentity.run_id = letter.context.run_id
    TaskIdentity.node_id = letter.context.node_id
    try:
        reply = Message(answer(letter.message.content), reply_to=letter.message)
        push_message(letter.client, reply, letter.context)
        push_task_output(letter.client, letter.context, SubStatus.COMPLETED, "")
    except httpx.HTTPError as error:
        warnings.warn(f"an answer could not be sent: {error}", stacklevel=2)
    finally:
        letter.heartbeat.stop()
        letter.client.close()


def _open(client: RuntimeHttpClient, letters: SimpleQueue[Letter]) -> None:
    """Wait until a message has arrived as a whole: one of a run that has ended never does."""
    heartbeat = Heartbeat(client)
    try:
        message, context = _pulled(client)
    except Exception as error:  # of many kinds: it is gone, or its run is
        heartbeat.stop()
        client.close()
        warnings.warn(f"a message did not arrive: {error}", stacklevel=2)
    else:
        letters.put(Letter(message, context, client, heartbeat))


def _pulled(client: RuntimeHttpClient) -> tuple[Message, Context]:
    """Return the message of a task: as Flower's own executor, but sooner, and without its code."""
    context = context_from_proto(client.PullTaskInput(PullTaskInputRequest()).context)
    (tree,) = client.PullMessages(PullAppMessagesRequest()).message_object_trees
    node = Node(node_id=context.node_id)
    return _pulled_as(node, context.run_id, client, tree), context


def _pulled_as(
    node: Node, run_id: int, client: RuntimeHttpClient, tree: ObjectTree, end: float = math.inf
) -> Message:
    """Return a message whose parts have come or, until the end, are about to come.

    Flower itself waits minutes for the rest of one whose node was killed as it sent it.
    """
    pull = make_pull_object_fn_protobuf(client.PullObject, node, run_id)

    def pull_in_time(id_: str) -> bytes:
        try:
            return pull(id_)
        except ObjectUnavailableError:
            if time.monotonic() > end:
                raise ObjectPullError(id_, "it has not come in time") from None
            raise

    contents = pull_objects(
        [part.object_id for part in iterate_object_tree(tree)],
        pull_in_time,
        max_tries_per_object=None,
        initial_backoff=_LOOK / 4,
        backoff_cap=1.0,
    )
    message = inflate_object_from_contents(tree.object_id, contents)
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = tree.object_id  # which it does not carry itself
    make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run_id)(
        tree.object_id
    )
    return message
