"""The Llama family on a CPU by the C++ kernels of the package `outpace_kernels`."""
