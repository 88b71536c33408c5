"""Drafters of outpace for other engines."""
