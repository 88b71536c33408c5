"""Structured output: restricts an answer to a JSON schema, a regex, a choice or a grammar (llguidance)."""
