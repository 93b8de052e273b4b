"""Flower's SuperLink with TLS for nodes, and with a control API for its owner only.

    python -m pflight.deploy.link HOST PORT CERTIFICATES FOLDER

Flower's own command lets everybody who reaches its port start runs and remove nodes. Here the port
accepts only the calls of nodes. All other calls use a Unix socket in the owner's folder.
"""

from __future__ import annotations

import asyncio
import os
import sys
from base64 import b64decode
from binascii import Error
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .flower import ACTIVATE, FLEET, KEY_HEADER, superlink_app

SOCKET, SECRET = "socket", "secret"
"""Files in the folder: the owner's socket, and the secret of the task executor."""
_SECONDS = 30  # until an idle connection is closed
_CONNECTIONS = 1000  # at most, at the same time
_SMALL = 4096  # bytes of an unknown node's call to activate, at most
_END = 2  # seconds for connections that are open at shutdown


class NodesOnly:
    """Forwards the calls of known nodes, and refuses all others unread.

    Args:
        app: The app that answers the calls and checks their signatures.
        knows: Returns whether a public key belongs to a known node.
    """

    def __init__(self, app: ASGIApp, knows: Callable[[bytes], bool]) -> None:
        self._app, self._knows = app, knows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call, or refuse it."""
        status = await asyncio.to_thread(self._refused, scope)
        if status is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = PlainTextResponse("", status, headers={"connection": "close"})
            await refusal(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    def _refused(self, scope: Scope) -> int | None:
        """Return the HTTP status of a refusal, or ``None`` for an allowed call."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return 404
        if scope["path"] not in FLEET or scope["raw_path"] != scope["path"].encode():
            return 404
        given = scope["headers"]
        keys, sizes = ([v for n, v in given if n == h] for h in (KEY_HEADER, b"content-length"))
        with suppress(Error, ValueError, IndexError):
            if len(keys) == 1 and self._knows(b64decode(keys[0], validate=True)):
                return None
            if scope["path"] == ACTIVATE and int(sizes[0]) <= _SMALL:  # it says why
                return None
        return 401


async def serve(host: str, port: int, certificates: Path, folder: Path) -> None:
    """Serve until a signal arrives."""
    app, knows = superlink_app((folder / SECRET).read_bytes())
    common: dict[str, Any] = {"timeout_graceful_shutdown": _END, "ws": "none", "log_config": None}
    front = uvicorn.Config(
        NodesOnly(app, knows),
        host,
        port,
        lifespan="off",  # the inner server runs it
        timeout_keep_alive=_SECONDS,
        limit_concurrency=_CONNECTIONS,
        server_header=False,
        ssl_keyfile=certificates / "server.key",
        ssl_certfile=certificates / "server.pem",
        **common,
    )
    inner = uvicorn.Config(app, uds=str(folder / SOCKET), lifespan="on", **common)
    servers = [uvicorn.Server(front), uvicorn.Server(inner)]
    tasks = [asyncio.create_task(server.serve()) for server in servers]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)


def main() -> None:
    """Serve with the options from the command line."""
    host, port, certificates, folder = sys.argv[1:]
    os.umask(0o077)
    asyncio.run(serve(host, int(port), Path(certificates), Path(folder)))


if __name__ == "__main__":
    main()
