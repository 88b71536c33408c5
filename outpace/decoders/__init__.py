"""Decoders: coroutines that ask for Draft, Verify, Commit, and are sent the answers."""
