"""The optimizers of gradcomp.optim against their uncompressed counterparts: a small byte-level language model, 2 ranks.

    python benchmarks/momentum.py --steps 400 --seeds 0 1 2

Equal steps, data, seeds and learning rates; prints a line of JSON per run with final evaluation loss and bytes sent. "Lamb" is
OneBitLamb that never freezes. (results/momentum.jsonl holds no seconds: the machine was busy with other work.)
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from gradcomp.demo import data, models
from gradcomp.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from gradcomp.testing import run

ADAM, LAMB = 2e-3, 6e-3
BATCH = 4


def make(name: str, ddp: DDP, steps: int) -> torch.optim.Optimizer:
    warmup = steps // 4
    options: dict[str, Any] = {"module": ddp, "weight_decay": 0.01, "bucket_cap_mb": 2.0}
    if name == "AdamW":
        return torch.optim.AdamW(ddp.parameters(), lr=ADAM)
    if name == "OneBitAdam":
        return OneBitAdam(ddp.parameters(), lr=ADAM, freeze_step=warmup, **options)
    if name == "ZeroOneAdam":
        return ZeroOneAdam(
            ddp.parameters(), lr=ADAM, var_freeze_step=warmup, local_step_scaler=warmup, local_step_clipper=4, **options
        )
    freeze = warmup if name == "OneBitLamb" else steps + 1
    return OneBitLamb(ddp.parameters(), lr=LAMB, freeze_step=freeze, **options)


def train(rank: int, world: int, name: str, seed: int, steps: int) -> dict[str, Any]:
    dataset = data.load("text", rank, world)
    torch.manual_seed(seed)
    ddp = DDP(models.build("text", dataset.train.shape[-1]))
    optimizer = make(name, ddp, steps)
    rise = steps // 8
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / rise, max(0.0, (steps - s) / (steps - rise)))
    )
    batches = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    numel = sum(p.numel() for p in ddp.parameters())
    begun = time.perf_counter()
    for _ in range(steps):
        inputs, targets = dataset.batch(BATCH, batches)
        loss = F.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    seconds = time.perf_counter() - begun
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.synchronize()
    inputs, targets = dataset.evaluation_share(rank, world)
    with torch.no_grad():
        total = torch.tensor(
            [float(F.cross_entropy(ddp.module(inputs).flatten(0, 1), targets.flatten(), reduction="sum"))]
        )
    count = torch.tensor([float(targets.numel())])
    dist.all_reduce(total)
    dist.all_reduce(count)
    sent, rounds = 8 * (world - 1) * numel // world * steps, steps
    result = {"optimizer": name, "seed": seed, "steps": steps, "loss": round(float(total / count), 4)}
    if not isinstance(optimizer, torch.optim.AdamW):
        stats = optimizer.stats()  # type: ignore[attr-defined]
        raw, sent, rounds = stats.raw_bytes, stats.wire_bytes, stats.collectives
        result["ratio"] = round(raw / sent, 2)
        result["compressed"] = round(
            1 - sum(p.numel() for n, p in ddp.module.named_parameters() if n in stats.bypassed) / numel, 4
        )
    return {**result, "megabytes": round(sent / 1e6, 1), "collectives": rounds, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--names", nargs="+", default=["AdamW", "OneBitAdam", "ZeroOneAdam", "Lamb", "OneBitLamb"])
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for name in arguments.names:
            print(json.dumps(run(train, 2, name, seed, arguments.steps, timeout=3000)[0]), flush=True)


if __name__ == "__main__":
    main()
