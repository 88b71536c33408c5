"""The Llama family in our own runtimes: configuration, layers, torch and native passes."""
