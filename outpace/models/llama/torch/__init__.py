"""The Llama family by torch, on any device, with exact arithmetic on a CPU."""
