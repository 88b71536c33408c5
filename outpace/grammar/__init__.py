"""Structured output: what an answer may be, from a JSON schema, a regex, a choice or a grammar (llguidance)."""
