"""Changing modules, classes and optimizers in place."""
