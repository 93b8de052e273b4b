"""What pflight expects of Flower's private interfaces: a release that changes one fails here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import requires, version
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from flwr.supercore.error import catalog
from flwr.supercore.retry import http_retry
from flwr.supernode import start_client_internal
from packaging.requirements import Requirement

from pflight.deploy import client, flower
from pflight.deploy.flower import FLEET, Owner, superlink_app

PACKAGE = Path(flower.__file__).parent


def parameters(function: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(function).parameters}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (flower.HttpGrid, {"runtime_api_address", "insecure", "token"}),
        (flower.RuntimeHttpClient, {"base_url", "interceptors", "retry_invoker"}),
        (flower.ControlHttpClient, {"base_url", "interceptors"}),
        (flower.RuntimeHttpClient.from_server_address, {"server_address", "root_certificates"}),
        (flower.pull_objects, {"max_tries_per_object", "initial_backoff", "backoff_cap"}),
        (flower.inflate_object_from_contents, {"object_id", "objects"}),
        (flower.make_pull_object_fn_protobuf, {"pull_object_protobuf", "node", "run_id"}),
        (flower.push_task_output, {"sub_status", "details"}),
        (flower.SuperExecAuthHttpInterceptor, {"master_secret", "protected_methods"}),
        (flower.RuntimeVersionHttpInterceptor, {"component_name"}),
        (flower.build_fab_from_files, {"files"}),
        (flower.Fab, {"hash_str", "content", "verifications"}),
    ],
)
def test_functions_take_what_they_are_given(function: Callable[..., Any], names: set[str]) -> None:
    assert names <= parameters(function)


@pytest.mark.parametrize(
    "call",
    [
        "AcquireTask",
        "PullTaskInput",
        "PullMessages",
        "PushMessages",
        "PullObject",
        "ConfirmMessageReceived",
        "PushTaskOutput",
        "SendTaskHeartbeat",
    ],
)
def test_a_runtime_has_the_calls_of_its_tasks(call: str) -> None:
    assert callable(getattr(flower.RuntimeHttpClient, call))


def test_connections_go_through_a_client_that_can_be_replaced(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "socket")
    for one in (owner.control(), owner.runtime(b"secret"), owner.task("token")):
        assert isinstance(one._client, httpx.Client)
        one.close()
    grid = owner.grid("token")
    assert grid._is_connected
    assert callable(grid._retry_invoker.should_giveup) or grid._retry_invoker.should_giveup is None
    assert grid._runtime_client is grid._client
    grid.close()


def test_a_superlink_is_an_app_with_nodes_that_it_knows() -> None:
    app, knows = superlink_app(b"secret")
    assert {*app.openapi()["paths"]} >= FLEET
    assert app.state.enable_supernode_auth
    assert app.state.superexec_auth_secret == b"secret"
    assert not knows(b"a stranger")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (start_client_internal, client._UNSENT + "%s: %s"),
        (catalog, client._REFUSED),
        (http_retry, client._LOST),
    ],
)
def test_a_supernode_says_what_is_looked_for(module: ModuleType, words: str) -> None:
    assert words in inspect.getsource(module)


def test_private_interfaces_stand_in_one_module() -> None:
    others = [path for path in PACKAGE.glob("*.py") if path.name != "flower.py"]
    lines = [line for path in others for line in path.read_text().splitlines()]
    assert {line for line in lines if line.startswith(("from flwr", "import flwr"))} <= {
        line for line in lines if line.startswith("from flwr.app import")
    }


def test_this_release_is_one_that_is_named() -> None:
    named = [Requirement(text) for text in requires("pflight") or () if text.startswith("flwr")]
    assert named
    assert all(version("flwr") in one.specifier for one in named)
