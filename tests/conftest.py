"""For all tests."""

import os

import torch

# Tiny tensors gain nothing from a second thread, and its spinning costs whatever runs beside.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before any of them is imported
