# %% [markdown]
# # Compare two methods honestly
#
# One run of each method says little: with another seed, the other may win. `compare` trains both
# methods with the same seeds, data and initial weights. It chooses rounds on validation samples, and
# says how sure the difference is.

# %%
# %pip install pflight

# %% [markdown]
# ## The question
#
# Write it down before you look. Twelve clients hold their pages at one of three angles. Is FeSEM
# with three clusters better than FedAvg?
#
# A comparison has the configuration of a run without its method:

# %%
from pathlib import Path

Path("angles.yaml").write_text("""
trainer:
  max_epochs: 12
  check_val_every_n_epoch: 4
  accelerator: cpu
data:
  class_path: KnownClusters
  init_args:
    data:
      class_path: Digits
      init_args:
        num_clients: 12
        val_fraction: 0.2
        test_fraction: 0.3
        partition: {class_path: IID}
    num_clusters: 3
    difference: rotation
    batch_size: 20
model:
  local_epochs: 5
  client:
    init_args:
      num_classes: 10
      network:
        class_path: pflight.models.MLP
        init_args: {in_features: 64, hidden: [32], num_classes: 10}
      optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
""")

# %% [markdown]
# ## The answer
#
# The same on the command line:
# `pflight compare --config angles.yaml --methods fedavg fesem --seeds 3 --set trainer.callbacks.num_clusters=3`.
# Each run has its folder in `results`. If you stop it and start it again, it continues.

# %%
from rich.console import Console

from pflight.experiments import compare

results = compare(
    "angles.yaml",
    ["fedavg", "fesem"],
    seeds=3,
    settings={"trainer.callbacks.num_clusters": [3]},
    out="results",
    console=Console(quiet=True),  # by default, it prints its progress
)

# %% [markdown]
# `results/table.md` has all tables. Here are the first two:

# %%
sections = Path("results/table.md").read_text().split("\n## ")
for section in sections[1:3]:
    print(section)

# %% [markdown]
# ## Read it
#
# - **macro acc.** is the mean over clients, ± the standard deviation over seeds.
# - **difference** is between the same client under both methods at the same seed, averaged.
# - **p, Holm** is corrected for the number of methods that are compared with the best. It counts
#   here only with three or more.
# - **better at** counts seeds. Three seeds can't show what happens at others: a sign test over them
#   gives 0.25 at best. The table says so in its notes.
#
# The notes also say whether the comparison was fair: whether all runs had the same data, weights,
# cohorts and batches.

# %%
for line in sections[-1].splitlines():
    if "seeds can't show" in line or line.startswith("- At each seed"):
        print(line)

# %% [markdown]
# ## Your own numbers
#
# The statistics are functions. Here are the differences of clients at three seeds, and the
# correction of three p-values:

# %%
import numpy as np

from pflight.experiments.statistics import differences, holm

random = np.random.default_rng(0)
seeds = [random.normal(0.02, 0.05, size=20) for _ in range(3)]
(found,) = differences([seeds])
print(
    f"{found.mean:.3f}, from {found.low:.3f} to {found.high:.3f}, p = {found.p:.4f}"
)
print(holm([0.01, 0.04, 0.03]))

# %% [markdown]
# ## Next
#
# - [What the statistics can't show](../comparing.md#what-the-statistics-cant-show).
# - [Tune each method](../comparing.md#tuning) with the same budget: `--tune trials=20`.
