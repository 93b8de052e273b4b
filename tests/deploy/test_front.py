"""What those who reach a server's port can do there, with and without a node's key."""

from __future__ import annotations

import http.client
import secrets
import ssl
import stat
import sys
import tempfile
import warnings
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from pflight.deploy.certificates import (
    check_server,
    make_certificates,
    make_key,
    node_key,
    write_private,
)
from pflight.deploy.flower import ACTIVATE, FLEET, KEY_HEADER, Owner, start_run, superlink_app
from pflight.deploy.link import SECRET, SOCKET
from pflight.deploy.processes import Process, free_port


class Server(NamedTuple):
    port: int
    folder: Path
    owner: Owner
    place: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A SuperLink with a run and two nodes."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    make_certificates(folder, ["localhost"])
    with tempfile.TemporaryDirectory() as place:
        write_private(Path(place, SECRET), secrets.token_hex(32).encode())
        words = [sys.executable, "-m", "pflight.deploy.link", "127.0.0.1", port, folder, place]
        process = Process([*map(str, words)], folder / "logs", "superlink")
        try:
            process.wait_until(lambda: check_server(f"localhost:{port}", folder / "ca.pem"))
            owner = Owner(Path(place, SOCKET))
            with owner.control() as control, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower imports
                start_run(control)
                for name in ("one", "other"):
                    key = node_key(make_key(folder / f"{name}.key"))
                    control.RegisterNode(RegisterNodeRequest(public_key=key))
            make_key(folder / "stranger.key")
            yield Server(port, folder, owner, Path(place))
        finally:
            process.stop()


def ask(
    server: Server, path: str, body: bytes = b"", method: str = "POST", key: str = ""
) -> tuple[int, bytes]:
    """Return the status and the content of an answer; the path is sent as it is."""
    headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
    if key:
        private = load_ssh_private_key((server.folder / f"{key}.key").read_bytes(), None)
        now = datetime.now(UTC).isoformat()
        headers[TIMESTAMP_HEADER] = now
        headers[KEY_HEADER.decode()] = b64encode(node_key(server.folder / f"{key}.pub")).decode()
        signature = sign_message(private, now.encode())  # type: ignore[arg-type]
        headers[FLEET_HTTP_SIGNATURE_HEADER] = b64encode(signature).decode()
    trust = ssl.create_default_context(cafile=str(server.folder / "ca.pem"))
    there = http.client.HTTPSConnection("localhost", server.port, context=trust, timeout=30)
    with closing(there):
        there.request(method, path, body, headers)
        answer = there.getresponse()
        return answer.status, answer.read()


def calls() -> list[tuple[str, str]]:
    """Return all calls that the SuperLink answers, whatever release of Flower this is."""
    app, _ = superlink_app(b"secret")
    found = []
    routes = [*app.routes]
    while routes:
        route = routes.pop()
        routes += getattr(route, "routes", None) or []
        found += [(method, route.path) for method in getattr(route, "methods", None) or ()]
    found += [("POST", path) for path in app.openapi()["paths"]]
    return sorted({*found})


def test_all_calls_but_those_of_nodes_are_refused(server: Server) -> None:
    everything = calls()
    others = [call for call in everything if call[1] not in FLEET or call[0] != "POST"]
    assert sum("/v1/control/" in path for _, path in others) > 20
    assert any("/v1/runtime" in path or "/v1/serverapp" in path for _, path in others)
    assert {path for _, path in everything} >= FLEET
    for key in ("", "stranger", "one"):
        statuses = {ask(server, path, method=method, key=key)[0] for method, path in others}
        assert statuses == {404}
    with server.owner.control() as control:  # and nothing has changed
        assert len(control.ListNodes(ListNodesRequest()).nodes_info) == 2
        assert len(control.ListRuns(ListRunsRequest()).run_dict) == 1


def test_calls_of_nodes_take_a_known_key(server: Server) -> None:
    for path in sorted(FLEET - {ACTIVATE}):
        assert ask(server, path)[0] == 401
        assert ask(server, path, b"0" * 100, key="stranger")[0] == 401
    stranger = node_key(server.folder / "stranger.pub")
    introduced = ActivateNodeRequest(public_key=stranger, heartbeat_interval=30)
    status, said = ask(server, ACTIVATE, introduced.SerializeToString(), key="stranger")
    assert status >= 400
    assert b"activate" in said  # by which its SuperNode knows that it is not let in
    assert ask(server, ACTIVATE, b"0" * 5000, key="stranger")[0] == 401
    public = node_key(server.folder / "one.pub")
    activate = ActivateNodeRequest(public_key=public, heartbeat_interval=30)
    body = activate.SerializeToString()
    assert ask(server, ACTIVATE, body, key="other")[0] == 401  # in the name of another node
    assert ask(server, ACTIVATE, body, key="one")[0] == 200
    with server.owner.control() as control:
        nodes = control.ListNodes(ListNodesRequest()).nodes_info
    (own,) = (node.node_id for node in nodes if node.public_key == public)
    pull = PullMessagesRequest(node=Node(node_id=own)).SerializeToString()
    assert ask(server, "/v1/fleet/pull-messages", pull, key="one")[0] == 200
    assert ask(server, "/v1/fleet/pull-messages", pull, key="other")[0] == 401


@pytest.mark.parametrize(
    "path",
    [
        "//v1/control/list-runs",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "/v1/fleet/pull-messages/../../control/list-runs",
        "/v1/fleet/pull-messages%00",
        "/v1/fleet/%70ull-messages",
        "/v1/fleet/pull-messages/",
        "/V1/CONTROL/LIST-RUNS",
        "/v1/control/list-runs?x=/v1/fleet/pull-messages",
        "https://localhost/v1/control/list-runs",
        "/v1/fleet/unregister-node",
        "/v1/fleet/register-node",
        "/docs",
        "/openapi.json",
        "*",
    ],
)
def test_paths_that_only_look_like_those_of_nodes(path: str, server: Server) -> None:
    for method in ("POST", "GET"):
        assert ask(server, path, method=method, key="one")[0] in (400, 404)


@pytest.mark.long
def test_only_the_owner_reaches_the_socket(server: Server) -> None:
    assert stat.S_IMODE(server.place.stat().st_mode) == 0o700
    assert stat.S_IMODE((server.place / SECRET).stat().st_mode) == 0o600
    assert {path.name for path in server.place.iterdir()} == {SECRET, SOCKET}
