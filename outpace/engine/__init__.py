"""The engine: one step for all running requests, their memory, drafting, and how an engine is built."""
