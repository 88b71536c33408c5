"""The Llama family by torch, one operation at a time."""
