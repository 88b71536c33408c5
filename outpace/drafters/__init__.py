"""Drafters: what proposes. One verb, `grow`."""
