"""Training tasks: heads, labels, losses, metrics, predictions and export."""
