"""The command ``pflight export``: the models of a finished run as files for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pflight.adapters.export import write_model
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.runs.folder import CONFIG
from pflight.server_callback import ServerCallback
from pflight.states.state import state_tensors, with_state

from .cli import FederationCLI, main
from .process import say


def export(options: argparse.Namespace) -> None:
    """Write the models that the options name."""
    run, out = Path(options.run), Path(options.out)
    config = run / CONFIG
    chosen = options.client, options.server

    def write(args: list[str] | None, stop: Any) -> None:
        if not config.is_file():
            raise ConfigurationError(f"{run} is no folder of a run: it has no {CONFIG}")
        if chosen.count(None) == 0:
            raise ConfigurationError("give --client or --server, not both")
        _Export(run, options.checkpoint, out, *chosen)

    main([], write)


class _Export(FederationCLI):
    """Makes the classes of a run from its configuration, and loads its checkpoint."""

    def __init__(
        self, run: Path, checkpoint: str, out: Path, client: int | None, server: int | None
    ) -> None:
        self._out, self._chosen = out, (client, server)
        args = ["validate", f"--config={run / CONFIG}", f"--trainer.default_root_dir={run}"]
        quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false"]
        super().__init__([*args, *quiet, f"--ckpt_path={checkpoint}"])

    def validate(self, **kwargs: Any) -> None:
        """Write the models instead."""
        if not isinstance(self.model, Federation):
            raise ConfigurationError("only runs of a Federation can be exported")
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        method = next((one for one in callbacks if isinstance(one, ServerCallback)), None)
        federation = Federation.load_from_checkpoint(
            kwargs["ckpt_path"], client=self.model.client, callback=method
        )
        client, server = self._chosen
        if server is not None:
            self._write_server(federation, server)
        elif client is not None:
            self._write(federation, federation.client_module(client), self._out)
        else:
            for each in range(federation.num_clients):
                module = federation.client_module(each)
                self._write(federation, module, self._out / f"client_{each}")

    def _write_server(self, federation: Federation, index: int) -> None:
        states = federation.server_states()
        if not 0 <= index < len(states):
            raise ConfigurationError(
                f"--server: there is no model {index}; the server has {len(states)}"
            )
        if own := sorted(state_tensors(federation.client).keys() - states[index].keys()):
            method = type(federation.server_callback).__name__
            raise ConfigurationError(
                f"--server: the server's model lacks what {method} adds at each client, such as "
                f"{own[0]}: export clients"
            )
        module = with_state(federation.client, states[index]).eval()
        self._write(federation, module, self._out)

    def _write(self, federation: Federation, module: Any, folder: Path) -> None:
        layout = federation.layout
        own = {*layout.own, *layout.extra}
        trained = [name for name in layout.moving if name not in own]
        for path in write_model(module, folder, trained):
            say(f"wrote {path}")
