"""Memory per GPU: pure formulas. n parameters, N ranks; results in bytes.

Model states: ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054, section 3 and figure 1): Adam in mixed precision holds 2 n
weights, 2 n gradients and K n = 12 n of optimizer states (fp32 weights, momentum, variance); stage 1 divides the states
among the ranks, stage 2 also the gradients, stage 3 also the weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

OPTIMIZERS = ("adam", "adam8bit", "sgd")
PRECISIONS = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per weight and gradient."""


def optimizer_bytes(optimizer: str, precision: str) -> float:
    """Bytes of optimizer state per parameter: fp32 weights (where the weights are not) plus the moments.

    ``adam``: 8 (two fp32 moments; Kingma, Ba 2014); ``adam8bit``: 2 and its block scales, 2 * 4 / 2048 (Dettmers et al. 2021,
    arXiv 2110.02861, blocks of 2048); ``sgd``: 4 (momentum).
    """
    master = 0 if precision == "fp32" else 4
    moments = {"adam": 8.0, "adam8bit": 2 + 2 * 4 / 2048, "sgd": 4.0}[optimizer]
    return master + moments


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on the GPU, and on the host per GPU if the optimizer is offloaded."""

    weights: float
    gradients: float
    optimizer: float
    host: float = 0.0

    @property
    def gpu(self) -> float:
        """All of it on the GPU."""
        return self.weights + self.gradients + self.optimizer


def model_states(
    n: float, ranks: int, precision: str, optimizer: str, sharded: Collection[str] = (), offload: bool = False
) -> States:
    """Weights, gradients and optimizer states; ``sharded`` of them divided by N.

    ``n (b_w / s_w + b_g / s_g + K / s_o)`` with s = N for what is sharded, else 1. 7.5e9 parameters on 64 GPUs: 120, 31.4,
    16.6 and 1.9 GB at stages 0 to 3 (ZeRO, figure 1). With ``offload`` (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840)
    optimizer states live on the host, and so do sharded gradients.
    """
    width = PRECISIONS[precision]

    def part(what: str) -> float:
        return n / ranks if what in sharded else n

    weights, gradients = width * part("weights"), width * part("gradients")
    states = optimizer_bytes(optimizer, precision) * part("optimizer")
    if not offload:
        return States(weights, gradients, states)
    host = states + (gradients if "gradients" in sharded else 0.0)
    return States(weights, 0.0 if "gradients" in sharded else gradients, 0.0, host)


def activations(
    *, layers: int, hidden: int, heads: int, vocabulary: int, batch: int, sequence: int, checkpointing: bool,
    flash: bool = True, width: int = 2,
) -> float:  # fmt: skip
    """Activations of one micro-batch: an estimate for transformers in 16 bit; fp32 (``width`` 4) counts twice.

    Per layer ``s b h (34 + 5 a s / h)`` without checkpointing, where the second term vanishes with flash attention; with
    checkpointing 2 s b h per layer and one layer's worth while it is recomputed; and fp32 logits, 4 s b V
    (Korthikanti et al. 2022, arXiv 2205.05198, equations 2 and 5, section 4.3). Zero if the shape is unknown.
    """
    tokens = batch * sequence
    layer = tokens * hidden * (34 + (0 if flash else 5 * heads * sequence / max(1, hidden))) * width / 2
    inside = layers * 2 * tokens * hidden * width / 2 + layer if checkpointing else layers * layer
    return inside + 4 * tokens * vocabulary


def trainer_buffers(
    scheme: str, n: float, width: int, bucket_elements: float, largest_unit: float, view: bool = True
) -> float:
    """What the trainer keeps beside the states.

    DDP: its buckets, a second copy of the gradients, unless ``gradient_as_bucket_view`` (``view``). ZeRO-1 and 2: two buckets
    (reduction and gather). ZeRO-3 and FSDP: two units of whole weights (one computing, one prefetched) and one of gradients.
    """
    if scheme in ("ddp", "diloco"):
        return 0.0 if view else width * n
    if scheme.startswith(("zero1", "zero2")):
        return 2 * width * min(bucket_elements, n)
    return 3 * width * largest_unit


def local_step_states(n: float) -> float:
    """DiLoCo: fp32 weights of the last meeting and the outer momentum, ``8 n`` (arXiv 2311.08105, algorithm 1)."""
    return 8 * n
