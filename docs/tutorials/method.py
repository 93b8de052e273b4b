# %% [markdown]
# # Write a method in 25 lines
#
# A method is a callback with a few functions: what clients are sent, what is added to their
# training, and what the server makes of their answers. This page writes one that pflight does not
# have, and tests it.

# %%
# %pip install pflight

# %% [markdown]
# ## The idea
#
# Clients fall into groups, but nobody knows how many. So let each client have the mean of the $k$
# models that are nearest to its own, by the Euclidean distance of their parameters. If $w_j$ is the
# last model of client $j$, then client $i$ is sent
#
# $$u_i = \frac{1}{k} \sum_{j \in N_k(i)} w_j,$$
#
# where $N_k(i)$ are the $k$ nearest clients, $i$ included.
#
# ## The method
#
# `StoredModels` keeps the last model of each client at the server. `broadcast` returns what the
# clients are sent: a tensor `[clients, ...]` for each parameter.

# %%
import torch
from tensordict import TensorDict

from pflight.callbacks.methods.stored import StoredModels


class Neighbours(StoredModels):
    def __init__(self, k: int = 5):
        super().__init__()
        self.k = k

    def broadcast(self, clients):
        models = self.stored.tensors()
        vectors = torch.cat(
            [models[n].flatten(1) for n in self.shared_parameters], dim=1
        )
        distances = torch.cdist(vectors[clients], vectors)
        nearest = distances.topk(self.k, largest=False).indices
        sent = {
            name: stack[nearest].mean(dim=1) for name, stack in models.items()
        }
        return TensorDict(sent, batch_size=[len(clients)])

    def set_pseudo_gradients(self):
        self.store_models()


# %% [markdown]
# That is all. A client is judged by what it would be sent next. Checkpoints hold the stored models,
# clients train one by one or stacked, traffic is counted, and modifiers such as `Clip(1.0)` work.
#
# ## Does it help?
#
# Sixteen clients write digits, and hold their pages at one of four angles.

# %%
from functools import partial

import lightning as L

from pflight import Federation
from pflight.callbacks import FedAvg, Local
from pflight.datamodules import IID, Digits, KnownClusters
from pflight.models import MLP, Classifier

digits = Digits(partition=IID(), num_clients=16, test_fraction=0.4)
data = KnownClusters(
    digits, num_clusters=4, difference="rotation", batch_size=10
)


def accuracy(algorithm, rounds=8, engine="auto"):
    L.seed_everything(0, verbose=False)
    sgd = partial(torch.optim.SGD, lr=0.1)
    client = Classifier(MLP(64, [32], 10), num_classes=10, optimizer=sgd)
    federation = Federation(client, local_epochs=3, engine=engine)
    trainer = L.Trainer(
        max_epochs=rounds,
        callbacks=[algorithm],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(federation, datamodule=data)
    trainer.test(federation, datamodule=data, verbose=False)
    return trainer.callback_metrics["test/macro_acc"].item()


values = {
    "Local": accuracy(Local()),
    "FedAvg": accuracy(FedAvg()),
    "Neighbours": accuracy(Neighbours(k=4)),
}
for name, value in values.items():
    print(f"{name:10} {value:.1%}")

# %% [markdown]
# ## Check it
#
# Two things that must hold: both engines agree, and with $k = 1$ each client trains alone.

# %%
one = accuracy(Neighbours(k=4), rounds=2, engine="sequential")
many = accuracy(Neighbours(k=4), rounds=2, engine="vectorized")
alone = accuracy(Neighbours(k=1))
print(f"one client at a time {one:.4f}, all at once {many:.4f}")
print(f"k=1 {alone:.4f}, Local {values['Local']:.4f}")

# %% [markdown]
# ## Next
#
# - [Five more methods](../own-methods.md), with changes of the clients' training and server state.
# - To use yours on the command line, write `class_path: neighbours.Neighbours` into a configuration.
#   Then [`pflight compare`](compare.md) takes it, too.
