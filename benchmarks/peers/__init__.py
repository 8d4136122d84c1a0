"""Peers to compare with: the same job by HF Trainer, stock Composer, and a plain PyTorch loop."""
