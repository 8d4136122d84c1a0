"""Predict with a finished run for the rows of a file."""
