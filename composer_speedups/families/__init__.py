"""Knowledge of transformers' model families, one file per family."""
