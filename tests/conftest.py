"""One thread for every process of the tests: their tensors are tiny, and sums keep their order."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start
torch.set_num_threads(1)
