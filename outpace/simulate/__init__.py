"""Runs the real engine, decoders and candidate cache on a simulated clock, with a recorded pair instead of models."""
