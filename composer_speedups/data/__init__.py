"""Sources of text, tokens and DataLoaders."""
