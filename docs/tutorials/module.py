# %% [markdown]
# # Your LightningModule
#
# A client of pflight is any LightningModule. You keep its `training_step`, its metrics and its
# optimizer, and wrap it in a `Federation`. Here, machines in twelve factories learn to predict
# their wear. Each factory has sensors of its own make, so one model fits none of them well.

# %%
# %pip install pflight

# %%
import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split
from torchmetrics import MeanAbsoluteError

from pflight import Federation
from pflight.callbacks import Ditto, FedAvg, Local
from pflight.datamodules import DatasetClients

L.seed_everything(0, verbose=False)

# %% [markdown]
# ## The module
#
# Nothing here knows of a federation. The module would train under a `Trainer` alone.


# %%
class Wear(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.mae = MeanAbsoluteError()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.mae(self.net(x), y)
        self.log("test/mae", self.mae)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


# %% [markdown]
# ## The data
#
# Give a torch `Dataset` for each client. These are generated: all factories share a curve, and each
# adds a deviation of its own.


# %%
def factory(common, machines=24):
    own = 0.3 * torch.randn(8)
    x = torch.randn(machines, 8)
    wear = torch.sin(x @ common) + x @ own + 0.2 * torch.randn(machines)
    return TensorDataset(x, wear[:, None])


common = 0.7 * torch.randn(8)
factories = [random_split(factory(common), [0.5, 0.5]) for _ in range(12)]
train, test = zip(*factories)
data = DatasetClients(train, test=test, batch_size=10)

# %% [markdown]
# ## Three ways to train it
#
# `Local` trains each factory alone. `FedAvg` trains one model. `Ditto` trains both, and draws each
# factory's own model towards the shared one.

# %%
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
errors = {}
for algorithm in (Local(), FedAvg(), Ditto(lam=0.3)):
    L.seed_everything(1, verbose=False)
    federation = Federation(Wear(), local_epochs=2)
    trainer = L.Trainer(max_epochs=20, callbacks=[algorithm], **quiet)
    trainer.fit(federation, datamodule=data)
    trainer.test(federation, datamodule=data, verbose=False)
    name = type(algorithm).__name__
    errors[name] = trainer.callback_metrics["test/macro_mae"].item()
    print(f"{name:7} mean absolute error {errors[name]:.3f}")

# %% [markdown]
# `test/macro_mae` is the mean over the factories. Each factory's own error is in `client_metrics`.
# The module logs a torchmetrics object, so there is also `test/pooled_mae`, over all machines.

# %%
print(federation.client_metrics("test")["mae"])
print(f"pooled: {trainer.callback_metrics['test/pooled_mae']:.3f}")

# %% [markdown]
# ## A factory's module
#
# The result is your own class, with the weights of one client.

# %%
wear = federation.client_module(3)
print(type(wear).__name__, wear.net(torch.zeros(1, 8)).item())

# %% [markdown]
# ## Next
#
# - [What your module may do](../modules.md): several optimizers, schedules, hooks, metrics.
# - [Images, text, segmentation, a GAN](../recipes.md).
