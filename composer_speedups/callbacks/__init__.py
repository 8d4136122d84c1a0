"""Callbacks: throughput, memory, and the report of what engaged."""
