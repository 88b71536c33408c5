"""Files of a model: found, fetched, checked, converted and packed."""
