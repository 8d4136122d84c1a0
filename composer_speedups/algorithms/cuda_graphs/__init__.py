from composer_speedups.algorithms.cuda_graphs.cuda_graphs import CUDAGraphs, apply_cuda_graphs

__all__ = ["CUDAGraphs", "apply_cuda_graphs"]
