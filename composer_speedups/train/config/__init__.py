"""The typed config: its keys, its checks, and reading and writing it as YAML."""
