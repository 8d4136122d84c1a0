"""In-place changes of optimizers and parameters, and the refusal to apply a technique twice with other settings."""
