"""GGUF files: their header, what it says of the model and its tokenizer, and their weights."""
