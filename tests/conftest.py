"""For all tests."""

import torch

# Tiny tensors gain nothing from a second thread, and its spinning costs whatever runs beside.
torch.set_num_threads(1)
