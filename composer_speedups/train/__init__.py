"""The training program: command line, config, checkpoints, run folder, report."""
