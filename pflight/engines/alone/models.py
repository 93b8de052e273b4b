"""The models of one client after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from pflight.engines.client_setup import ClientSetup
from pflight.method import OWN, PERSONAL
from pflight.randomness import generators_of, isolated
from pflight.runs.allocator import give_freed_memory_back
from pflight.states.state import StateModule
from pflight.states.updates import STOPS
from pflight.task import Task, trains_as_a_task

from .client import SCALARS, AloneClient
from .copies import Copies
from .trainer import STEP_HOOKS

HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start"),
    *STEP_HOOKS,
    *("on_train_epoch_end", "on_train_end", "on_fit_end"),
)
"""Hooks of a module around its training."""
_LARGE_KERNEL = 2**20  # weights; such a convolution takes 1.2 times as long channels-last


class LocalModels:
    """A client's copy of the module and, if its method has one, its personal copy.

    Args:
        setup: The client module, its client method, and its data.

    Attributes:
        client: The current client.
        clients: The client's models. The personal one is first: it may read the other before a
            step.
        hooks: The module's own hooks around its training steps.
        plain: Whether the module trains exactly as a ready-made task.
        draws: Whether the module has its own random generators.
    """

    client: AloneClient
    clients: list[AloneClient]

    def __init__(self, setup: ClientSetup) -> None:
        self.setup = setup
        self.client_method = setup.client_method
        self._channels_last = False
        self._drifted: set[str] = set()
        self._copies: Any = None
        self.clients = []
        self._personal_copies: Copies | None = None
        module = setup.client
        self.draws = bool(generators_of(module))
        self.hooks = [hook for hook in HOOKS if is_overridden(hook, module)]
        self.plain = (
            trains_as_a_task(module)
            and setup.form is not None
            and not self.hooks
            and module.automatic_optimization
            and getattr(module, "gradient_clip_val", None) is None
            and type(module).configure_gradient_clipping is Task.configure_gradient_clipping
            and type(module).configure_optimizers is Task.configure_optimizers
        )
        self.renew()

    def renew(self) -> None:
        """Forget all changes of the copies."""
        setup = self.setup
        for copies in filter(None, (self._copies, self._personal_copies)):
            copies.close()
        for client in self.clients:
            vars(client).clear()  # its received model and its memory
        if self.clients:
            give_freed_memory_back()
        device = setup.device
        arguments = setup.client, setup.layout, setup.precision, device, self._channels_last
        self._copies = Copies(*arguments)
        self._personal_copies = None if self.client_method.personal is None else Copies(*arguments)
        own = [name for name in setup.layout.own if name.startswith(OWN)]
        held = StateModule({name.removeprefix(OWN): setup.layout.template[name] for name in own})
        setup.precision.convert_module(held).to(device)
        self._own = held.tensors()
        dtype = setup.dtype if setup.dtype.is_floating_point else torch.float32
        self._scalars = {name: torch.zeros((), dtype=dtype, device=device) for name in SCALARS}

    @property
    def module(self) -> LightningModule:
        """The current copy of the client module."""
        return self._copies.module

    def load(
        self,
        start: Mapping[str, Tensor],
        anchored: bool,
        memory: Mapping[str, Tensor] | None = None,
        client: int | None = None,
    ) -> None:
        """Load the next client into the copies.

        Args:
            start: The client's state.
            anchored: Whether the client knows its start, the model that the server sent.
            memory: The client's memory.
            client: The client's id, if it needs its own class counts.
        """
        self._load(self._copies, start, "")
        for name, tensor in self._own.items():
            tensor.copy_(start[f"{OWN}{name}"])
        for name in ("seen", "num_steps"):
            self._scalars[name].zero_()
        self._scalars["mean_samples"].fill_(self.setup.mean_samples)
        received = self._laid_out({n: start[n] for n in self._copies.live}) if anchored else None
        known = self._own, self._scalars, received
        self.client = AloneClient(self._copies, self.client_method, *known)
        self.clients = [self.client]
        if client is not None and self.client_method.needs_classes:
            self.client.class_counts = self.setup.class_counts[client]
        if memory is not None:
            self.client.remembered = self._laid_out(memory)
            self.client.seen.fill_(1)
        if self._personal_copies is None:
            return
        self._load(self._personal_copies, start, PERSONAL)
        if anchored:
            assert self.client_method.personal is not None
            personal = AloneClient(
                self._personal_copies, self.client_method.personal, *known, self.client
            )
            self.clients = [personal, self.client]

    def _load(self, copies: Copies, start: Mapping[str, Tensor], prefix: str) -> None:
        copies.load(start, prefix, reuse=self.plain)
        if self.setup.tells_round:
            copies.set_round(self.setup.round_index)

    def _laid_out(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors of the module in the memory format of its copies."""
        if not self._channels_last:
            return tensors
        return {
            name: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
            for name, t in tensors.items()
        }

    def evaluated(self, state: Mapping[str, Tensor]) -> LightningModule:
        """Return the copy of the module with a client's tensors, in evaluation mode."""
        self._load(self._copies, state, "")
        return self.module.eval()

    def mend_frozen(self) -> None:
        """Reset changed frozen tensors. Warn once of each."""
        for copies in filter(None, (self._copies, self._personal_copies)):
            for name in copies.frozen.mend(copies.module):
                if name not in self._drifted:
                    self._drifted.add(name)
                    rank_zero_warn(f"training changed the frozen {name!r}; it is reset each time")

    def state(self) -> dict[str, Tensor]:
        """Return the state of the current client."""
        held = {**self._copies.tensors(), **{f"{OWN}{n}": t for n, t in self._own.items()}}
        if self._personal_copies is not None:
            held |= {f"{PERSONAL}{n}": t for n, t in self._personal_copies.tensors().items()}
        return held

    def try_channels_last(self) -> None:
        """Use the memory format channels-last if it is faster and the module allows it."""
        kernels = [
            part.weight.numel()
            for part in self.setup.client.modules()
            if isinstance(part, nn.Conv2d)
        ]
        on_cpu = self.setup.device.type == "cpu"
        if on_cpu and self.plain and 0 < max(kernels, default=0) < _LARGE_KERNEL:
            self._channels_last = True
            self.renew()
            with isolated(self.setup.device):
                self._channels_last = self._runs()
            self.renew()

    def _runs(self) -> bool:
        """Try a step and an evaluation. A ``view`` in the client may need the usual layout."""
        setup = self.setup
        assert setup.form is not None
        start = {name: t.to(setup.device) for name, t in setup.layout.template.items()}
        memory = None
        if self.client_method.remembers:
            names = self.client_method.all_remembered(setup.layout)
            memory = {name: start[entry] for name, entry in names.items()}
        try:
            self.load(start, anchored=True, memory=memory, client=0)
            batch = setup.form.batch([leaf.clone() for leaf in setup.example])
            with setup.forward_context(), torch.enable_grad():
                for client in self.clients:
                    client.client_method.objective(client, batch).backward()
            with torch.no_grad():
                self.client.after_training()
                self.client.remember()
            self.client.module.eval()
            with setup.forward_context(), torch.no_grad():
                self.client.module(setup.example[0])
        except STOPS:
            raise
        except BaseException:
            return False
        return True
