from composer_speedups.algorithms.lora.export import merged_state_dict, save_adapter
from composer_speedups.algorithms.lora.lora import LoRA, apply_lora

__all__ = ["LoRA", "apply_lora", "merged_state_dict", "save_adapter"]
