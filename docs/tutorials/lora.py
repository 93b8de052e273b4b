# %% [markdown]
# # A LoRA for each client
#
# You have a trained network, and clients whose data differ from what it was trained on. This page
# freezes the network and gives each client a small adapter (LoRA). Only adapters train and travel.

# %%
# %pip install "pflight[peft]"

# %%
import copy
from functools import partial

import lightning as L
import torch

from pflight import Federation
from pflight.adapters.export import write_model
from pflight.callbacks import FedAvg
from pflight.datamodules import IID, Digits, KnownClusters
from pflight.models import MLP, Classifier, LoRA
from pflight.modifiers import Private

L.seed_everything(0, verbose=False)
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

# %% [markdown]
# ## A trained network
#
# It has learnt upright digits. `centralized()` has them as an ordinary data module.

# %%
upright = Digits(
    partition=IID(), num_clients=12, test_fraction=0.5, batch_size=20
)
upright.setup()
network = MLP(64, [64, 64], 10)
teacher = Classifier(network, 10, optimizer=partial(torch.optim.SGD, lr=0.1))
trainer = L.Trainer(max_epochs=10, limit_val_batches=0, **quiet)
trainer.fit(teacher, datamodule=upright.centralized())

# %% [markdown]
# ## The clients
#
# Each of twelve clients holds the page at one of four angles.

# %%
rotated = KnownClusters(
    upright, num_clusters=4, difference="rotation", batch_size=10
)

# %% [markdown]
# ## Adapters
#
# `LoRA` puts adapters of rank 4 on the hidden layers. All else is frozen, so that it neither trains
# nor travels. In the first run, the server averages the adapters. In the second, `Private` keeps
# the factor B with each client and shares A (FedSA-LoRA).


# %%
def adapt(algorithm, rounds=10):
    L.seed_everything(0, verbose=False)
    adapted = LoRA(
        copy.deepcopy(network), targets=["hidden.0", "hidden.1"], rank=4
    )
    client = Classifier(
        adapted, 10, optimizer=partial(torch.optim.AdamW, lr=0.01)
    )
    federation = Federation(client, local_epochs=2)
    trainer = L.Trainer(
        max_epochs=rounds, callbacks=[algorithm], limit_val_batches=0, **quiet
    )
    trainer.fit(federation, datamodule=rotated)
    trainer.test(federation, datamodule=rotated, verbose=False)
    return federation, trainer.callback_metrics["test/macro_acc"].item()


with torch.no_grad():
    tests = [
        rotated.samples(client, "test") for client in range(rotated.num_clients)
    ]
    right = [(network(x).argmax(1) == y).float().mean() for x, y in tests]
before = float(torch.stack(right).mean())
_, shared = adapt(FedAvg())
federation, personal = adapt(FedAvg(modifiers=[Private("*lora_B*")]))
print(f"the network as it is     {before:.1%}")
print(f"one adapter for all      {shared:.1%}")
print(f"an adapter for each      {personal:.1%}")

# %% [markdown]
# A client sends little: the factors A alone.

# %%
sent = federation.history[-1].bytes_up / rotated.num_clients
whole = 4 * sum(p.numel() for p in network.parameters())
print(f"{sent:,.0f} bytes a client and round; the network has {whole:,}")

# %% [markdown]
# ## Take an adapter along
#
# `write_model` writes a client's adapter as peft loads it, on any copy of the network.

# %%
import peft

write_model(federation.client_module(5), "adapter")
model = peft.PeftModel.from_pretrained(copy.deepcopy(network), "adapter").eval()
x, y = rotated.samples(5, "test")
with torch.no_grad():
    loaded = (model(x).argmax(1) == y).float().mean()
trained = federation.client_metrics("test")["acc"][5]
print(f"client 5: {trained:.1%} in the federation, {loaded:.1%} from the files")

# %% [markdown]
# ## Next
#
# - [All methods with adapters](../adapters.md#methods), ranks for each client, and language models.
# - [Methods that group or mix adapters](../methods/adapters.md), such as FedLEASE and FedDPA.
