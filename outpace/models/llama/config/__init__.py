"""Model sizes and architecture details read from a config.json."""
