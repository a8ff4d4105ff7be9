"""FSDP2 with compressed gradients and parameters: held-out loss of a small byte-level language model, 2 ranks.

    python benchmarks/fsdp.py --steps 200 --seeds 0 1 2

AdamW, equal steps, data, seeds and learning rates. Prints a row of JSON (schema.py) per run: final evaluation loss and the bytes
that a rank sent, for gradients and for parameters, 0 where FSDP2 does it itself. ``weights``:

* ``exact``: FSDP2's own all-gather;
* ``int8``: ``gradcomp.integrations.fsdp.register_all_gather``;
* ``int4``: the same in blocks of 4 bits, which the library does not offer;
* ``difference4``: every rank keeps what it last gathered, in fp32 and whole; shards send the 4-bit difference from it in
  forward and nothing in backward. The error of a step is that of the last difference, it does not add up.
"""

from __future__ import annotations

import argparse
from typing import Any

import schema
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gradcomp.collectives import AllGather, Group
from gradcomp.demo import data, models
from gradcomp.integrations import fsdp
from gradcomp.integrations.fsdp_gather import BlockAllGather, GatherStats
from gradcomp.integrations.fsdp_units import Unit, find_units
from gradcomp.kernels.select import get_ops
from gradcomp.testing import run

BATCH, RATE, BLOCK, WARMUP = 4, 2e-3, 256, 20


class Differences(BlockAllGather):
    """Gathers what changed since the last gather."""

    def __init__(self, unit: Unit, group: Group, stats: GatherStats) -> None:
        super().__init__(unit, group, 4, BLOCK, get_ops(torch.device("cpu")), stats)
        self._unit, self._seen = unit, torch.empty(0)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """As FSDP2 calls it."""
        mine = slice(self._group.rank * self._row, (self._group.rank + 1) * self._row)
        if not self._seen.numel():
            self._seen = torch.empty(self._row * self._group.world)
            request = AllGather(input_tensor.clone().view(torch.uint8), self._seen.view(torch.uint8))
            self._group.run(request)
            self._stats.wire_bytes += request.wire_bytes(self._group.world)
            self._stats.raw_bytes += request.wire_bytes(self._group.world)
        elif self._unit.group._training_state.name == "PRE_BACKWARD":
            self._stats.raw_bytes += 4 * (self._group.world - 1) * self._row
        else:
            change = torch.empty_like(self._seen)
            super().__call__(change, input_tensor - self._seen[mine], group)
            self._seen += change
        output_tensor.copy_(self._seen)


def gather_parameters(model: torch.nn.Module, weights: str) -> GatherStats | None:
    """Install the all-gather called ``weights``."""
    if weights == "exact":
        return None
    if weights == "int8":
        return fsdp.register_all_gather(model)
    stats = GatherStats()
    for unit in find_units(model, "benchmark"):
        group = Group(unit.process_group)
        if weights == "int4":
            comm = BlockAllGather(unit, group, 4, BLOCK, get_ops(torch.device("cpu")), stats)
        else:
            comm = Differences(unit, group, stats)
        unit.module.set_custom_all_gather(comm)
    return stats


def train(rank: int, world: int, gradients: str, weights: str, seed: int, steps: int) -> dict[str, Any]:
    """One run; the losses are of the exact parameters, as a checkpoint would hold them."""
    dataset = data.load("text", rank, world)
    torch.manual_seed(seed)
    model = models.build("text", dataset.train.shape[-1])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    handle = None
    if gradients != "native":
        handle = fsdp.register(model, gradients, warmup_steps=WARMUP if gradients.startswith("onebit") else 0)
    gathered = gather_parameters(model, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rise = steps // 8
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / rise, max(0.0, (steps - s) / (steps - rise)))
    )
    batches = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    for _ in range(steps):
        inputs, targets = dataset.batch(BATCH, batches)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    plain = models.build("text", dataset.train.shape[-1])
    plain.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    inputs, targets = dataset.evaluation_share(rank, world)
    with torch.no_grad():
        summed = F.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    total = torch.tensor([float(summed), float(targets.numel())])
    dist.all_reduce(total)
    stats = handle.stats() if handle is not None else None
    return {
        "loss": round(float(total[0] / total[1]), 4),
        "gradient_bytes": stats.wire_bytes if stats else 0,
        "gradient_ratio": round(stats.ratio_per_step, 2) if stats else 1.0,
        "weight_bytes": gathered.wire_bytes if gathered else 0,
        "weight_ratio": round(gathered.ratio, 2) if gathered else 1.0,
    }


RUNS = (
    ("native", "exact"), ("native", "int8"), ("native", "int4"), ("native", "difference4"), ("int8", "exact"),
    ("int8", "int8"), ("int4", "exact"), ("onebit", "exact"), ("onebit:error_feedback=true", "exact"),
)  # fmt: skip


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="run only these pairs, written native/int8")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for gradients, weights in RUNS:
            if arguments.only is None or f"{gradients}/{weights}" in arguments.only:
                measured = run(train, 2, gradients, weights, seed, arguments.steps, timeout=3000)[0]
                config = {"gradients": gradients, "weights": weights, "steps": arguments.steps, "ranks": 2}
                row = schema.Row.make("fsdp", config=config, seed=seed, measured=measured)
                print(row.model_dump_json(exclude_defaults=True), flush=True)


if __name__ == "__main__":
    main()
