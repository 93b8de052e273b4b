# %% [markdown]
# # Your CSV with a hospital column
#
# You have one table, and a column says to which hospital a row belongs. This page makes a client of
# each hospital, trains, and writes a table with a row for each hospital.

# %%
# %pip install pflight

# %% [markdown]
# Here is such a file. In your own work, start with the next section. Age, pressure and sugar change
# the risk in all hospitals, but each hospital also has its own kind of patients.

# %%
import numpy as np

random = np.random.default_rng(0)
names = "Bern Gent Graz Lund Metz Oulu Pisa Riga Turku Vigo".split()
with open("patients.csv", "w") as file:
    print("hospital,age,pressure,sugar,weight,ill", file=file)
    for name in names:
        effects = [1.0, 0.8, -0.6, 0.4] + 0.5 * random.normal(size=4)
        for x in random.normal(size=(random.integers(60, 140), 4)):
            ill = int(x @ effects + 0.5 * random.normal() > 0)
            print(name, *x.round(2), ill, sep=",", file=file)

# %% [markdown]
# ## Read it
#
# NumPy reads the columns by name. Scale the features with numbers that all hospitals may know, such
# as the normal ranges of the laboratory. (Here they have mean 0 and deviation 1 already.)

# %%
import torch

from pflight.datamodules import TensorClients

table = np.genfromtxt(
    "patients.csv", delimiter=",", names=True, dtype=None, encoding="utf8"
)
features = ["age", "pressure", "sugar", "weight"]
hospitals = np.unique(table["hospital"])
train, val, test = [], [], []
for hospital in hospitals:
    rows = random.permutation(table[table["hospital"] == hospital])
    x = torch.tensor(
        np.stack([rows[name] for name in features], 1), dtype=torch.float
    )
    y = torch.tensor(rows["ill"].copy())
    first, second = len(y) * 2 // 10, len(y) * 4 // 10
    train.append((x[:first], y[:first]))
    val.append((x[first:second], y[first:second]))
    test.append((x[second:], y[second:]))
data = TensorClients(
    train,
    val=val,
    test=test,
    num_classes=2,
    client_names=hospitals.tolist(),
    batch_size=8,
)

# %% [markdown]
# ## Train
#
# `ClientTable` writes the results of each hospital. The checkpoint keeps the round that was best on
# the validation rows. The rows of the test choose nothing.

# %%
from functools import partial
from pathlib import Path

import lightning as L

from pflight import Federation
from pflight.callbacks import ClientTable, Ditto, FedAvg, Local
from pflight.models import MLP, Classifier


def accuracy(algorithm):
    L.seed_everything(0, verbose=False)
    sgd = partial(torch.optim.SGD, lr=0.1)
    logistic = Classifier(MLP(4, [], 2), num_classes=2, optimizer=sgd)
    best = L.pytorch.callbacks.ModelCheckpoint(
        monitor="val/macro_acc", mode="max"
    )
    folder = Path("runs", type(algorithm).__name__)
    trainer = L.Trainer(
        max_epochs=10,
        callbacks=[algorithm, best, ClientTable()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Federation(logistic, local_epochs=2), datamodule=data)
    (found,) = trainer.test(ckpt_path="best", datamodule=data, verbose=False)
    return found["test/macro_acc"]


found = {
    type(one).__name__: accuracy(one)
    for one in (Local(), FedAvg(), Ditto(lam=0.3))
}
print({name: f"{value:.1%}" for name, value in found.items()})

# %% [markdown]
# A hospital alone has few patients. One model for all ignores what differs. Ditto's personal models
# use both. `runs/Ditto/clients.csv` has the metrics of each hospital, of its own model and of the
# shared one:

# %%
table = np.genfromtxt(
    "runs/Ditto/clients.csv",
    delimiter=",",
    names=True,
    dtype=None,
    encoding="utf8",
)
for row in table:
    name, shared, own = row["name"], row["serveracc"], row["acc"]
    print(
        f"{name:6} {row['num_samples']:3} rows  shared {shared:.1%}  own {own:.1%}"
    )

# %% [markdown]
# ## Next
#
# - [Your own data](../data.md#your-own-data): larger than memory, or with names and newcomers.
# - [Compare methods](../comparing.md) on this table with one command.
