"""Operations as Triton kernels, for CUDA; on a CPU by Triton's interpreter."""
