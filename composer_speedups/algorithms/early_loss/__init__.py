from composer_speedups.algorithms.early_loss.early_loss import EarlyLoss, apply_early_loss

__all__ = ["EarlyLoss", "apply_early_loss"]
