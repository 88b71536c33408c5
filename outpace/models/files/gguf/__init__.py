"""Reads GGUF files: header, model and tokenizer metadata, and weights."""
