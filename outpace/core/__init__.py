"""The foundation of all other packages: types, the token tree, sampling, noise, errors and the registry."""
