# %% [markdown]
# # Watch it in TensorBoard
#
# A federation logs like any LightningModule. This page trains with TensorBoard on, shows the
# pictures that a run draws, and reads the curves back as numbers.

# %%
# %pip install pflight
# %matplotlib inline

# %%
from functools import partial

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from pflight import Federation
from pflight.callbacks import (
    ClusterExamples,
    ConvergencePlot,
    FeSEM,
    TensorBoardReport,
)
from pflight.datamodules import IID, Digits, KnownClusters
from pflight.models import MLP, Classifier

L.seed_everything(0, verbose=False)

# %% [markdown]
# ## A run with pictures
#
# Each picture is a callback. `TensorBoardReport` adds the partition of the data, and a page that
# compares runs by their options. The command line adds it by itself, and the pictures with
# `--config configs/trainer/pictures.yaml`.

# %%
digits = Digits(
    partition=IID(), num_clients=20, val_fraction=0.2, test_fraction=0.3
)
data = KnownClusters(
    digits, num_clusters=4, difference="rotation", batch_size=10
)
client = Classifier(
    MLP(64, [32], 10), 10, optimizer=partial(torch.optim.SGD, lr=0.1)
)
curves, examples = ConvergencePlot(), ClusterExamples(every=8)
trainer = L.Trainer(
    max_epochs=8,
    callbacks=[FeSEM(num_clusters=4), curves, examples, TensorBoardReport()],
    logger=TensorBoardLogger("runs", name="fesem"),
    default_root_dir="runs/fesem",
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=1,
)
federation = Federation(client, local_epochs=5)
trainer.fit(federation, datamodule=data)

# %% [markdown]
# ## Open TensorBoard
#
# In a notebook:

# %%
# %load_ext tensorboard
# %tensorboard --logdir runs

# %% [markdown]
# In a terminal, `tensorboard --logdir runs` shows all runs of the folder at
# `http://localhost:6006`. Tags are sorted by what they are about:
#
# | tags | |
# |---|---|
# | `val/…`, `test/…` | metrics over clients, of the model that a client uses; `val/server/…` is what the server sends |
# | `train/…` | the clients' losses |
# | `communication/…` | bytes down and up |
# | `clients/…` | how many were drawn, and how many failed |
# | `fesem/…` and others | what the method says of itself |
# | `pictures/…` | under *Images* |
#
# ## The pictures
#
# They are also in `runs/fesem/pictures`, and `figures` returns them. This one has the accuracy over
# rounds:

# %%
next(iter(curves.figures(federation).values()))

# %% [markdown]
# Images of four clients of each cluster. You see at once what a cluster has in common:

# %%
next(iter(examples.figures(federation).values()))

# %% [markdown]
# ## The numbers
#
# Read TensorBoard's files, or `federation.history`, which has the same values without a logger.

# %%
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)

events = EventAccumulator(trainer.logger.log_dir)
events.Reload()
for tag in ("val/macro_acc", "fesem/rand_index", "communication/bytes_up"):
    points = events.Scalars(tag)
    print(f"{tag:24}", *(f"{point.value:.4g}" for point in points))
last = federation.history[-1]
print(
    f"round {last.index}: {last.bytes_up:,} bytes from {len(last.clients)} clients"
)

# %% [markdown]
# ## Next
#
# - [What each metric means](../concepts.md#what-is-judged), and [the run folder](../cli.md).
