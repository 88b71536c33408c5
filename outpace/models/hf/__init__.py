"""Runs any causal language model of transformers behind outpace's model interface."""
