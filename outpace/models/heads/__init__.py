"""Trained heads: drafts that read the target's hidden states. They have no text of their own, only the target's."""
