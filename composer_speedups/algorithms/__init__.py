"""The techniques, one folder each. :mod:`composer_speedups.core.registry` maps their YAML names to their classes."""
