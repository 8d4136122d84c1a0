from composer_speedups.algorithms.sdpa_attention.sdpa_attention import SDPAAttention, apply_sdpa_attention

__all__ = ["SDPAAttention", "apply_sdpa_attention"]
