"""Trains a draft model for a target from the target alone: writes training text, trains on it, and evaluates."""
