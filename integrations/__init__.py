"""Integrations: the only place that knows a trainer; each module puts compression into one of them.

``ddp``        :class:`torch.nn.parallel.DistributedDataParallel`, through its communication hook
``fsdp``       FSDP2 (:func:`torch.distributed.fsdp.fully_shard`), through its custom communication and all-reduce hook
``dcp``        :mod:`torch.distributed.checkpoint`: a handle's state beside model and optimizer
``deepspeed``  DeepSpeed's engine at every ZeRO stage, and its removed 1-bit optimizers
``dispatch``   :func:`gradcomp.register`: the right one of them for a model
``lightning``, ``accelerate``, ``transformers``  these trainers, which wrap the model themselves; ``trainers``: what they share
"""

if __name__ != "gradcomp.integrations":
    raise ImportError(
        "this folder is the package gradcomp.integrations (gradcomp/integrations links to it): write "
        "`import gradcomp.integrations`. If you meant another package named `integrations`, run from another folder "
        "(`pytest`, not `python -m pytest`)."
    )
