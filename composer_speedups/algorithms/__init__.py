"""The techniques, one folder each. :mod:`composer_speedups.core.registry` maps YAML names to classes."""
