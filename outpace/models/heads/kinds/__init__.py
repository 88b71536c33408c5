"""Kinds of trained heads, one per file: a subclass of `heads.head.Head`."""
