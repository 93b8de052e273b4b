# %% [markdown]
# # Who belongs together
#
# Clients often fall into groups, and nobody knows which. FeSEM finds groups while it trains: it
# keeps some models, and each client joins the model that is nearest to its own. Here the groups are
# known to us but not to the server, so that you see whether it finds them.

# %%
# %pip install pflight

# %%
from functools import partial

import lightning as L
import matplotlib.pyplot as plt
import torch

from pflight import Federation
from pflight.callbacks import ClusterPlot, FedAvg, FeSEM
from pflight.datamodules import IID, Digits, KnownClusters
from pflight.models import MLP, Classifier

# %% [markdown]
# ## Four hidden groups
#
# Twenty clients write the same digits, but hold their pages at four angles. Here is a 4 of a client
# of each group:

# %%
digits = Digits(partition=IID(), num_clients=20, test_fraction=0.3)
data = KnownClusters(
    digits, num_clusters=4, difference="rotation", batch_size=10
)
data.setup()
figure, axes = plt.subplots(1, 4, figsize=(8, 2))
for group, axis in enumerate(axes):
    client = data.clusters.tolist().index(group)
    images, labels = data.samples(client, "train")
    image = images[labels == 4][0]
    axis.imshow(image.view(8, 8).numpy(), cmap="gray_r")
    axis.set(xticks=[], yticks=[], xlabel=f"client {client}")
plt.show()

# %% [markdown]
# ## Train with one model, and with four
#
# `fesem/rand_index` compares the clusters with the true groups: 1 if they are equal, and about 0 if
# they are random. `ClusterPlot` draws the clients' models.


# %%
def train(*callbacks):
    L.seed_everything(0, verbose=False)
    network = MLP(64, [32], 10)
    client = Classifier(network, 10, optimizer=partial(torch.optim.SGD, lr=0.1))
    federation = Federation(client, local_epochs=5)
    trainer = L.Trainer(
        max_epochs=8,
        callbacks=list(callbacks),
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(federation, datamodule=data)
    trainer.test(federation, datamodule=data, verbose=False)
    return federation


one = train(FedAvg()).client_metrics("test")["acc"].mean()
plot = ClusterPlot()
federation = train(FeSEM(num_clusters=4), plot)
four = federation.client_metrics("test")["acc"].mean()
print(f"one model {one:.1%}, four models {four:.1%}")

# %%
for record in federation.history:
    print(
        f"round {record.index}: rand index {record.metrics['fesem/rand_index']:.2f}"
    )

# %% [markdown]
# ## Who is where
#
# `assignments` has the cluster of each client. The server's numbers of clusters mean nothing, so
# compare which clients are together.

# %%
found = federation.server_callback.assignments
for cluster in found.unique().tolist():
    members = (found == cluster).nonzero().flatten()
    print(f"cluster {cluster}: clients {members.tolist()}")
    print(f"           groups {data.clusters[members].tolist()}")

# %% [markdown]
# Each point is a client's model, in the plane of the first two principal components.

# %%
plot.figures(federation)["clusters"]

# %% [markdown]
# ## When you don't know how many
#
# `FeSEM("auto")` chooses the number of clusters by held-out losses. It chooses one where clusters do
# not pay.
#
# ## Next
#
# - [FeSEM](../fesem.md), its options, and [other methods that cluster](../methods/clustering.md).
# - [Clients that move](../drift.md) to another group while you train.
