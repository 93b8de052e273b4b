"""The two sides of a federation as a Flower app, for those who have a SuperLink already."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import HttpGrid

from pflight.cli import main as command_line
from pflight.errors import ConfigurationError

from .client import NodeCLI
from .node import Node
from .server import ServerCLI
from .superlink import GridPost, give_up_with

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server of a federation, with ``config`` and ``keys`` of the app's run config."""
    assert isinstance(grid, HttpGrid)
    give_up_with(grid)
    config = context.run_config
    timeout, patience = (float(config.get(name, 0)) for name in ("round-timeout", "patience"))
    post = GridPost(grid, timeout or None, patience or 600.0)
    keys, places = Path(str(config["keys"])), int(config.get("places") or 0) or None
    cli = partial(ServerCLI, connect=lambda: nullcontext(post), folder=keys, places=places)
    command_line(["fit", "--config", *str(config["config"]).split()], cli)


@client.query()
@client.train()
@client.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Answer a message, with ``config``, ``folder`` and ``client`` of the node's config."""
    given = {name: str(value) for name, value in context.node_config.items()}
    if missing := [name for name in ("config", "folder") if name not in given]:
        raise ConfigurationError(
            f"the node's config has no {missing[0]}: start flower-supernode with --node-config "
            '\'config="run.yaml" folder="state"\''
        )
    node = _node(given["config"], given["folder"], int(given.get("client", "0")))
    return Message(node.answer(message.content), reply_to=message)


@functools.cache
def _node(config: str, folder: str, own: int) -> Node:
    return NodeCLI(["fit", "--config", *config.split()], Path(folder, "memory"), own).node
