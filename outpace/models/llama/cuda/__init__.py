"""The Llama family by captured passes: CUDA graphs, or their stand-in on a CPU."""
