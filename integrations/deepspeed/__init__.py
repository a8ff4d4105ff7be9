"""DeepSpeed: compressed gradients at every ZeRO stage, and the 1-bit optimizers that it dropped.

Three ways in, all of which end in :func:`attach`::

    engine, optimizer, _, _ = gradcomp.integrations.deepspeed.initialize(...)      # instead of deepspeed.initialize
    handle = gradcomp.register(engine, "int8")                                     # after deepspeed.initialize
    with gradcomp.integrations.deepspeed.patched_initialize(): ...                 # around Accelerate or the HF Trainer

The block ``"gradcomp": {"compressor": "int8"}`` of DeepSpeed's JSON configuration says what :func:`initialize` does.

DeepSpeed has no interface for this. Which method moves the gradients differs by stage, so :mod:`.stages` replaces that one
method of the one engine or optimizer (never of a class, never for the whole process); :mod:`.checks` refuses what it
does not know. Everything else is the handle that DDP uses.
"""

from gradcomp.integrations.deepspeed.attach import DeepSpeedHandle, attach
from gradcomp.integrations.deepspeed.initialize import initialize, patched_initialize
from gradcomp.integrations.deepspeed.optimizers import attach_optimizer

__all__ = ["DeepSpeedHandle", "attach", "attach_optimizer", "initialize", "patched_initialize"]
