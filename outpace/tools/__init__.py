"""Tool calls and reasoning: definitions, grammars that enforce calls, and parsers of the streamed text."""
