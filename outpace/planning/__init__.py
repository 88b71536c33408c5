"""Predicts times and acceptance, and chooses from both how much each round drafts and verifies."""
