"""Runs a target in several processes, started by torch.distributed.run: rank 0 leads, the other ranks follow."""
