"""The metrics of a federation for one module that is trained on the samples of all clients."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from pflight.data.data_module import Centralized
from pflight.errors import ConfigurationError
from pflight.metrics.collection import ClientMetrics, F1Average
from pflight.models.classifier import as_classifier
from pflight.options import checked
from pflight.runs.distributed import owned


@checked
class ClientMeans(L.Callback):
    """Judges one module by each client's own samples, and logs a federation's metrics.

    It is for a plain Trainer on the union of the clients' data. Accuracy and F1 have the names that
    they have in a federation: ``val/macro_acc``, ``val/micro_f1`` and the like, and those of
    newcomers ``test/new/…``. The mean loss is the module's own ``val/loss``.

    Args:
        f1_average: As in :class:`~pflight.metrics.collection.ClientMetrics`.

    Raises:
        ConfigurationError: Before the start, if the module is no
            :class:`~pflight.models.Classifier`, or the data are not
            :class:`~pflight.datamodules.Centralized`.
    """

    def __init__(self, f1_average: F1Average = "union") -> None:
        self.f1_average = f1_average

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the module and the data."""
        as_classifier(pl_module, type(self).__name__)
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, Centralized):
            raise ConfigurationError(
                f"{type(self).__name__} needs the data of all clients: use Centralized as the "
                f"data, not {type(data).__name__}"
            )

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the means over clients of their validation samples."""
        self._log(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the means over clients of their test samples, apart for newcomers."""
        self._log(trainer, pl_module, "test")

    def _log(self, trainer: Any, module: Any, split: Literal["val", "test"]) -> None:
        whole = trainer.datamodule
        groups = {"": whole.clients}
        if split == "test" and len(whole.data.new_clients):
            groups["new/"] = whole.data.new_clients
        how = whole.data.num_clients, module.num_classes
        metrics = ClientMetrics(*how, f1_average=self.f1_average).to(module.device)
        for client in owned(torch.cat([*groups.values()])).tolist():
            own = whole.data.client(client)
            batches = own.val_dataloader() if split == "val" else own.test_dataloader()
            for x, y in batches:
                metrics.update(*self._predicted(trainer, module, client, x, y))
        for group, clients in groups.items():
            means = metrics.compute(clients)
            means.pop("loss")  # the module logs it
            module.log_dict({f"{split}/{group}{name}": mean for name, mean in means.items()})

    def _predicted(
        self, trainer: Any, module: Any, client: int, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return client, prediction and label of each sample of a batch ``[n]``."""
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            outputs = module(trainer.precision_plugin.convert_input(x.to(module.device)))
        labels = y.to(module.device)
        return torch.full_like(labels, client), outputs.argmax(dim=1), labels
