"""Measures outpace's methods and other engines on the same prompts."""
