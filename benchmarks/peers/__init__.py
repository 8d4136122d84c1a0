"""What the suite is measured beside: the same job by HF Trainer, and by a plain PyTorch loop."""
