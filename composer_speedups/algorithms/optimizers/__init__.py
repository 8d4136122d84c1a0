"""Every AdamW and its kin. :mod:`.optimizers` declares the techniques, :mod:`.kinds` is the table of what they run,
:mod:`.swap` changes or replaces an optimizer, :mod:`.proof` observes its first step, and :mod:`.technique` connects
them with the contract of all techniques.
"""

TECHNIQUES = (
    "adafactor",
    "apex_optimizer",
    "bnb_optimizer",
    "foreach_optimizer",
    "fused_optimizer",
    "kahan_optimizer",
    "lowbit_optimizer",
    "offloaded_optimizer",
    "sharded_optimizer",
)
