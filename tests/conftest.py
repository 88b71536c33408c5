"""One thread a test: tiny products gain nothing from more, and threads that spin lose much on a busy machine."""

import torch

torch.set_num_threads(1)
