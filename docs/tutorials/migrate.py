# %% [markdown]
# # From PFLlib, Flower and FL-bench
#
# Find your option in the left column, and what it is called here in the right one. The last section
# runs a typical command of PFLlib. On the command line, `Federation(local_epochs=5)` is
# `--model.local_epochs 5`, an option of the Trainer `--trainer.…`, and one of the data `--data.…`.
# [How it works](../concepts.md) explains rounds and metrics.

# %%
# %pip install pflight

# %% [markdown]
# ## PFLlib
#
# | `python generate_MNIST.py …` | the data module, as `FashionMNIST(…)` |
# |---|---|
# | `num_clients = 20`, `-nc 20` | `num_clients=20` |
# | `noniid - dir`, with `alpha = 0.1` | `partition=Dirichlet(0.1)` |
# | `noniid - pat`, with `class_per_client=2` | `partition=ClassesPerClient(2)` |
# | `iid balance -` | `partition=IID()` |
# | `train_ratio = 0.75` | `test_fraction=0.25` |
#
# | `python main.py …` | here |
# |---|---|
# | `-algo FedProx` | the Trainer's callback: `FedProx(…)` |
# | `-m CNN` | `Classifier(network, num_classes=10)` with any `nn.Module` |
# | `-gr 100` (trains 101 rounds) | `Trainer(max_epochs=100)` |
# | `-ls 5` | `Federation(local_epochs=5)` |
# | `-lbs 10`, `-jr 0.5` | data: `batch_size=10`, `participation=0.5` |
# | `-lr 0.005` | the optimizer of the client: `partial(SGD, lr=0.005)` |
# | `-ld True -ldg 0.99` | `Federation(client_lr_decay=0.99)` |
# | `-eg 5` | `Trainer(check_val_every_n_epoch=5)` |
# | `-dev cuda -did 0` | `Trainer(accelerator="gpu", devices=[0])` |
# | `-cdr 0.1` | data: `dropout=0.1` |
# | `-nnc 5 -ften 3`, of 20 clients | data: `holdout_clients=0.25`; `Federation(newcomer_epochs=3)` |
# | `-t 3` | `pflight compare … --seeds 3` |
#
# | a method's option | here |
# |---|---|
# | FedProx `-mu 0.01` | `FedProx(mu=0.01)` |
# | Ditto `-mu 0.1` (its default is 0) | `Ditto(lam=0.1)` |
# | FedRep `-pls 2` | `FedRep(head_epochs=2)` |
# | APFL `-al 0.5` | `APFL(alpha=0.5)` |
# | MOON `-mu 1 -tau 0.5` | `MOON(mu=1.0, tau=0.5)` |
# | pFedMe `-bt 1 -lam 15 -K 5 -lrp 0.01` | `PFedMe(beta=1.0, lam=15.0, personal_steps=5, personal_lr=0.01)` |
# | FedALA `-et 1 -s 80 -p 2` | `FedALA(lr=1.0, share=0.8, layers=1)`: PFLlib counts tensors |
# | FedFomo `-M 5` | `FedFomo(num_models=5)` |
# | SCAFFOLD `-slr 1` | `SCAFFOLD(lr=1.0)` |
# | FedBABU `-fte 10` | `FedBABU()` with `Federation(finetune_epochs=10)` |
#
# PFLlib's *Averaged Test Accuracy* weighs clients by their samples: it is `test/micro_acc`. Its
# *Best accuracy* is the best round on test samples. Here a round is chosen on validation samples, so
# give `val_fraction`.
#
# ## FL-bench
#
# | `python generate_data.py …` | the data module |
# |---|---|
# | `-cn 100` | `num_clients=100` |
# | `-a 0.1 -ms 10` | `partition=Dirichlet(0.1, min_samples=10)` |
# | `-c 2`, `-s 2`, `--iid 1` | `ClassesPerClient(2)`, `ClassShards(2)`, `IID()` |
# | `-vr 0.1 -tr 0.25` | `val_fraction=0.1, test_fraction=0.25` |
# | `-sp user -tr 0.2` | `holdout_clients=0.2` |
# | its `partition.pkl` | `pflight prepare partition partition.pkl --out mine.json`; `Given("mine.json")` |
# | `--seed 42` | `seed=42` |
#
# | `python main.py …` | here |
# |---|---|
# | `method=fedprox fedprox.mu=0.01` | the callback `FedProx(mu=0.01)` |
# | `common.global_epoch=100` | `Trainer(max_epochs=100)` |
# | `common.local_epoch=5` | `Federation(local_epochs=5)` |
# | `common.join_ratio=0.1 common.batch_size=32` | data: `participation=0.1, batch_size=32` |
# | `common.seed=42` | `Federation(seed=42)`; `--seed_everything 42` seeds everything |
# | `optimizer.name=sgd optimizer.lr=0.01` | the optimizer of the client |
# | `common.buffers=global`, `local`, `drop` | the callback's `buffers="shared"`, `"local"`, `"reset"` |
# | `common.test.client.interval=10` | `Trainer(check_val_every_n_epoch=10)` |
# | `common.test.client.finetune_epoch=5` | `Federation(finetune_epochs=5)` |
# | `mode=parallel` | nothing: clients are [stacked](../concepts.md#engines) |
# | `common.monitor=tensorboard` | the default |
#
# ## Flower
#
# | Flower | here |
# |---|---|
# | `@app.train()` of a `ClientApp` | `training_step` and `configure_optimizers` of your module |
# | `@app.evaluate()` | `validation_step` and `test_step` |
# | `FedAvg(fraction_train=0.1)` | data: `participation=0.1` |
# | `strategy.start(…, num_rounds=3)` | `Trainer(max_epochs=3)` |
# | `FedProx(proximal_mu=0.1)`, and the term in your client | `FedProx(mu=0.1)` |
# | `FedAdam(eta=0.1, beta_1=0.9, beta_2=0.99, tau=0.001)` | `FedAvg()` and `Federation(server_optimizer=…)`, as in [FedAdam](../methods/optimisation.md#fedavgm-fedadam-and-fedyogi) |
# | `run-config` of `pyproject.toml` | a YAML file, or options of `pflight fit` |
# | `DirichletPartitioner(20, "label", 0.5, min_partition_size=10)` | `Dirichlet(0.5, min_samples=10)`, `num_clients=20` |
# | `PathologicalPartitioner(20, "label", 2)` | `ClassesPerClient(2)` |
# | `NaturalIdPartitioner("writer")` | `ByUser()` |
# | `flower-superlink`, `flower-supernode` | [`pflight deploy server`, `pflight deploy client`](deploy.md) |
#
# ## A command of PFLlib
#
# ```sh
# python generate_MNIST.py noniid - dir
# python main.py -data MNIST -m DNN -nc 20 -algo Ditto -mu 0.1 -gr 15 -ls 2 -lbs 10 -lr 0.05
# ```
#
# Here it is with scikit-learn's digits, which need no download. `-m DNN` has one hidden layer of 100.

# %%
from functools import partial

import lightning as L
import torch

from pflight import Federation
from pflight.callbacks import Ditto
from pflight.datamodules import Digits, Dirichlet
from pflight.models import MLP, Classifier

L.seed_everything(0, verbose=False)
data = Digits(
    partition=Dirichlet(0.1, min_samples=10),
    num_clients=20,
    val_fraction=0.15,
    test_fraction=0.25,
    batch_size=10,
)
network = MLP(64, [100], 10)
client = Classifier(
    network, num_classes=10, optimizer=partial(torch.optim.SGD, lr=0.05)
)
federation = Federation(client, local_epochs=2)
best = L.pytorch.callbacks.ModelCheckpoint(
    "best", monitor="val/micro_acc", mode="max"
)
trainer = L.Trainer(
    max_epochs=15,
    callbacks=[Ditto(lam=0.1), best],
    check_val_every_n_epoch=5,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(federation, datamodule=data)
(found,) = trainer.test(ckpt_path="best", datamodule=data, verbose=False)
print(f"personal models: {found['test/micro_acc']:.1%}")
print(f"shared model:    {found['test/server/micro_acc']:.1%}")
