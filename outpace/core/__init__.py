"""The nouns that every floor above shares: trees, sampling, noise, steps, errors, the registry."""
