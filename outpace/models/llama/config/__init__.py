"""What a config.json of the Llama family says: sizes, layers, rotary embeddings, and what each architecture adds."""
