"""Reviews → tokens → DataLoader."""

from composer_speedups.data.loader import Data, build_data

__all__ = ["Data", "build_data"]
