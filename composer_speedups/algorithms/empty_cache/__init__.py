from composer_speedups.algorithms.empty_cache.empty_cache import EmptyCache, apply_empty_cache

__all__ = ["EmptyCache", "apply_empty_cache"]
