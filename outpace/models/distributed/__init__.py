"""Runs a target over several processes that torch.distributed.run started: rank 0 leads, the other ranks follow."""
