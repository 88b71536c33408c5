"""Causal language models that transformers runs, behind the interface of our own."""
