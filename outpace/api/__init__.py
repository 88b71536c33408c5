"""The Python library: load a model, generate text, stream it as it is written."""
