"""In-place changes of modules, classes and optimizers."""
