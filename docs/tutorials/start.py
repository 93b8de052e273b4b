# %% [markdown]
# # Five minutes to a personalised result
#
# Twenty people write digits, and each of them writes only three of the ten. You train one model for
# all of them, make it a personal model for each, and compare the two on each person's own images.
# You need no data and no GPU.

# %%
# %pip install pflight
# %matplotlib inline

# %%
from functools import partial

import lightning as L
import matplotlib.pyplot as plt
import torch

from pflight import Federation
from pflight.callbacks import FedAvg
from pflight.datamodules import ClassesPerClient, Digits
from pflight.models import MLP, Classifier

L.seed_everything(0, verbose=False)

# %% [markdown]
# ## The clients
#
# scikit-learn's 1,797 images of digits are dealt to 20 clients. Each client has three of the ten
# digits. Two fifths of its images are kept for the test.

# %%
data = Digits(
    partition=ClassesPerClient(3),
    num_clients=20,
    test_fraction=0.4,
    batch_size=10,
)
data.setup()
data.partition_figure()

# %% [markdown]
# ## Train
#
# A `Federation` is a LightningModule. It trains copies of your client module. The algorithm is a
# callback of the ordinary `Trainer`, and an epoch is a round of communication. In each of ten
# rounds, all clients train for two epochs on their own images, and the server averages their
# models.
#
# `finetune_epochs=5` makes it personal: before a client is judged, it trains the server's model for
# five more epochs on its own images.

# %%
network = MLP(64, [32], 10)
client = Classifier(
    network, num_classes=10, optimizer=partial(torch.optim.SGD, lr=0.1)
)
federation = Federation(client, local_epochs=2, finetune_epochs=5)
trainer = L.Trainer(
    max_epochs=10,
    callbacks=[FedAvg()],
    limit_val_batches=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(federation, datamodule=data)
trainer.test(federation, datamodule=data, verbose=False)

# %% [markdown]
# ## Compare
#
# Accuracies are means over the clients, each on its own test images.

# %%
shared = federation.client_metrics("test", "server/")["acc"]
personal = federation.client_metrics("test")["acc"]
print(f"one model for all: {shared.mean():.1%}")
print(f"a model for each:  {personal.mean():.1%}")
print(
    f"{int((personal > shared).sum())} gain, {int((personal < shared).sum())} lose"
)

# %% [markdown]
# Each point is a client. Above the line, the client's own model is better.

# %%
plt.figure(figsize=(4, 4))
plt.scatter(shared.numpy(), personal.numpy(), alpha=0.6)
plt.plot([0.6, 1], [0.6, 1], color="gray", linewidth=1)
plt.xlabel("accuracy of the shared model")
plt.ylabel("accuracy of the client's own model")
plt.show()

# %% [markdown]
# ## Use a client's model
#
# `client_module` returns a client's model as an ordinary LightningModule.

# %%
module = federation.client_module(7)
images, labels = data.samples(7, "test")
with torch.no_grad():
    print("predicted:", module(images[:10]).argmax(1).tolist())
print("written:  ", labels[:10].tolist())

# %% [markdown]
# ## Next
#
# - [Train your own LightningModule](module.md), or [start from a CSV file](hospitals.md).
# - [All methods](../algorithms.md), and [a comparison of them](../comparison.md).
