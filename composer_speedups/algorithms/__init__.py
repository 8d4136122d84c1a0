"""The techniques, one folder each. :mod:`.registry` maps their YAML names to their classes."""
