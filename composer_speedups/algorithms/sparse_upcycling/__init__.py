from composer_speedups.algorithms.sparse_upcycling.checkpoint import load_sparse_upcycling
from composer_speedups.algorithms.sparse_upcycling.loss import load_balancing_loss
from composer_speedups.algorithms.sparse_upcycling.sparse_upcycling import SparseUpcycling, apply_sparse_upcycling

__all__ = ["SparseUpcycling", "apply_sparse_upcycling", "load_balancing_loss", "load_sparse_upcycling"]
