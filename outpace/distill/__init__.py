"""Trains a draft for any target from nothing but the target: its text, a small model, training, judgement."""
