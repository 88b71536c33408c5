"""The Llama family on a GPU: forwards captured as CUDA graphs, and kernels in Triton."""
