"""Models: what scores a forest of token trees, and where their weights come from."""
