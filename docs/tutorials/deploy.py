# %% [markdown]
# # Deploy over TLS
#
# A simulation becomes a real federation without new code: a server on one machine, and each client
# on another with its own data. This page plays all of them on your machine, as processes that talk
# over TLS. Each command is what you would type on the machine that it belongs to.

# %%
# %pip install "pflight[flower]"

# %%
import subprocess
import sys
from pathlib import Path

from pflight.deploy.processes import free_port


def pflight(*words, log):
    command = [sys.executable, "-m", "pflight", *map(str, words)]
    with open(log, "w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


# %% [markdown]
# ## One configuration for all
#
# Server and nodes read the same file, which is also that of the simulation. Here, both nodes find
# scikit-learn's digits, and each uses those of its client. In real life, each has [its own
# data](../deployment.md#data-of-your-own).

# %%
Path("run.yaml").write_text("""
trainer:
  max_epochs: 2
  check_val_every_n_epoch: 2
  accelerator: cpu
  enable_progress_bar: false
  callbacks+:
    - {class_path: Ditto, init_args: {lam: 0.1}}
model:
  client:
    class_path: Classifier
    init_args:
      network:
        class_path: pflight.models.MLP
        init_args: {in_features: 64, hidden: [16], num_classes: 10}
      num_classes: 10
      optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data:
  class_path: Digits
  init_args: {num_clients: 2, batch_size: 20}
""")

# %% [markdown]
# ## Certificates and keys
#
# The server's operator makes an authority and the server's certificate. Each node makes a key. The
# private key never leaves the node. The operator gets the public one, and so knows the node.

# %%
pflight(
    "deploy", "certificates", "certificates", "--host", "localhost", log="log"
).wait()
for node in ("bern", "oulu"):
    pflight("deploy", "certificates", node, "--key", node, log="log").wait()
    Path(node, f"{node}.pub").rename(f"certificates/nodes/{node}.pub")
print(
    *sorted(str(path) for path in Path("certificates").rglob("*.*")), sep="\n"
)

# %% [markdown]
# ## Start
#
# Nodes and server start in any order. In real life, these are three machines, and the port is 9092.

# %%
port = free_port()
nodes = []
for client, node in enumerate(("bern", "oulu")):
    where = ["--server", f"localhost:{port}", "--ca", "certificates/ca.pem"]
    own = ["--key", f"{node}/{node}.key", "--folder", node, "--client", client]
    options = [*where, *own, "--config", "run.yaml"]
    nodes.append(pflight("deploy", "client", *options, log=f"{node}.log"))

options = [
    "--certificates",
    "certificates",
    "--host",
    "127.0.0.1",
    "--port",
    port,
]
options += ["--config", "run.yaml", "--trainer.default_root_dir", "deployed"]
status = pflight("deploy", "server", *options, log="server.log").wait()
for node in nodes:
    node.terminate()
    node.wait()
print(Path("server.log").read_text())

# %% [markdown]
# And this is what a node says:

# %%
print(Path("bern.log").read_text())

# %% [markdown]
# ## The same numbers
#
# `pflight fit` with the same file simulates this federation. The server's weights are equal.

# %%
import torch

options = ["--config", "run.yaml", "--trainer.default_root_dir", "simulated"]
pflight("fit", *options, "--model.engine", "sequential", log="log").wait()
deployed, simulated = (
    torch.load(f"{run}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for run in ("deployed", "simulated")
)
print(max(float((deployed[n] - simulated[n]).abs().max()) for n in simulated))

# %% [markdown]
# ## Next
#
# - [Deployment](../deployment.md): what leaves a node, what can go wrong, how to operate it.
# - `pflight deploy demo` does all this with one command.
