"""Callbacks for throughput, memory, NaN and diverging losses, and the report of engaged techniques."""
