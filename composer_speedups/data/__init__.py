"""Data sources, tokenization and DataLoaders."""
