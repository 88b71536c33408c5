"""Trained heads: draft models that read the hidden states of the one target for which they were trained."""
