"""What is trained: heads, losses, metrics and export."""
