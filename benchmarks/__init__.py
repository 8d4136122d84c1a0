"""Benchmarks: tables of configurations from YAML files, each run in its own process, with results kept as rows."""
