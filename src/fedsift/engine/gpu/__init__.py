"""Fast training on a GPU: stacked clients, CUDA graphs and Triton kernels."""
