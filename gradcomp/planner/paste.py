"""The recommendation as something to paste: a DeepSpeed configuration, or lines of Python."""

from __future__ import annotations

import json
from typing import Any

from gradcomp.errors import ConfigError
from gradcomp.planner.predict import ZERO_BUCKET, Job, Row
from gradcomp.planner.volume import SCHEMES
from gradcomp.registry import parse_spec

_WARMUP = 200
"""Uncompressed steps before a strongly biased compressor starts."""


def warmup_steps(spec: str) -> int:
    """Steps to exchange uncompressed first: 200 for strongly biased compressors, none for the others."""
    return _WARMUP if parse_spec(spec)[0].traits.strongly_biased else 0


def deepspeed_config(job: Job, row: Row) -> dict[str, Any]:
    """A DeepSpeed configuration for ``row`` (ZeRO-1 to 3 or ZeRO++), with the key ``gradcomp`` if it compresses."""
    stage = {"zero1": 1, "zero2": 2, "zero3": 3, "zero++": 3}[row.scheme]
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True}
    zero["reduce_bucket_size"] = ZERO_BUCKET
    if stage < 3:
        zero["allgather_bucket_size"] = ZERO_BUCKET
    else:
        zero["stage3_prefetch_bucket_size"] = ZERO_BUCKET
    zero["overlap_comm"] = row.compressor in ("none", "built in") and job.overlap
    if job.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if row.scheme == "zero++":
        zero |= {
            "zero_quantized_weights": True, "zero_quantized_gradients": True,
            "zero_hpz_partition_size": job.gpus_per_node,
        }  # fmt: skip
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    if job.precision != "fp32":
        config[job.precision] = {"enabled": True}
    if row.compressor not in ("none", "built in"):
        config["gradcomp"] = {"compressor": row.compressor}
        if warmup_steps(row.compressor):
            config["gradcomp"]["warmup_steps"] = warmup_steps(row.compressor)
    return config


def ddp_lines(job: Job, row: Row) -> str:
    """The lines for DistributedDataParallel."""
    bucket = "" if job.bucket_mb == 25 else f", bucket_cap_mb={job.bucket_mb:g}"
    lines = [f"ddp = DistributedDataParallel(model, gradient_as_bucket_view=True{bucket})"]
    return "\n".join(lines + _register("ddp", row))


def fsdp_lines(job: Job, row: Row) -> str:
    """The lines for FSDP2."""
    keep = ", reshard_after_forward=False" if row.scheme == "fsdp2-keep" else ""
    lines = ["for layer in model.layers:", f"    fully_shard(layer{keep})", f"fully_shard(model{keep})"]
    if SCHEMES[row.scheme].weight_spec:
        lines += ["from gradcomp.integrations.fsdp import register_all_gather", "register_all_gather(model)"]
    return "\n".join(lines + _register("model", row))


def _register(what: str, row: Row) -> list[str]:
    if row.compressor == "none":
        return ["# gradients as they are: compressing them would not pay here"]
    warm = warmup_steps(row.compressor)
    options = f", warmup_steps={warm}" if warm else ""
    return [f'handle = gradcomp.register({what}, "{row.compressor}"{options})']


def paste(job: Job, row: Row) -> str:
    """What to paste for ``row``: JSON for DeepSpeed, else Python.

    Raises:
        ConfigError: nothing in gradcomp runs this scheme.
    """
    trainer = SCHEMES[row.scheme].trainer
    if trainer == "deepspeed":
        return json.dumps(deepspeed_config(job, row), indent=2)
    if trainer == "ddp":
        return ddp_lines(job, row)
    if trainer == "fsdp2":
        return fsdp_lines(job, row)
    raise ConfigError(
        f"scheme={row.scheme!r}: allowed is a scheme that a trainer runs: ddp, zero1, zero2, zero3, fsdp2"
    )
