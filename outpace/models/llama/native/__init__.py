"""The Llama family on a CPU by the package outpace-kernels."""
