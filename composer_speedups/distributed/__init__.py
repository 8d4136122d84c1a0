"""Training on several GPUs: DDP, FSDP, reductions of host scalars, balanced sampling."""
