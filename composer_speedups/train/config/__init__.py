"""The typed config: its keys, its checks, and the YAML that it is read from and written to."""
