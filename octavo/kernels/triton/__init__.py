"""The operations as Triton kernels, for CUDA; on a CPU through Triton's interpreter."""
