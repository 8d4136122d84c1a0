"""Measured tables: arms from a YAML file, each in a fresh process, kept as rows."""
