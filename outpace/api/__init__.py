"""The library: load a model, ask it, read its answer as it comes."""
