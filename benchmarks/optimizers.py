"""Which compressor converges under which optimizer: final held-out loss at equal steps, 2 ranks, several learning rates.

    python benchmarks/optimizers.py --out benchmarks/results/optimizers.jsonl       # about 25 minutes on 2 cores
    python benchmarks/optimizers.py --steps 20 --seeds 1 --specs none,int8          # does it run?

Trains the demo's byte-level transformer (1.4 M parameters) on the standard library's source, with the demo's schedule of
the learning rate. The peak learning rates are one that is tuned for the uncompressed run (see gradcomp/demo/settings.py)
and a quarter of it; gradients are clipped to norm 1 or not at all. Compressors that the traits call strongly biased get a
tenth of the steps uncompressed first. One JSON line per run: machine, versions, config, seed, loss.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.demo import data, models
from gradcomp.testing import run

SPECS = ["none", "int8", "powersgd", "onebit", "topk"]
SETTINGS = [  # optimizer, peak learning rate, gradient clipping
    ("sgd", 0.2, 1.0),
    ("sgd", 0.2, None),
    ("sgd", 0.05, None),
    ("adamw", 2e-3, 1.0),
    ("adamw", 2e-3, None),
    ("adamw", 5e-4, None),
]


def train(
    rank: int, world: int, spec: str, optimizer: str, peak: float, clip: float | None, steps: int, seed: int
) -> dict[str, float]:
    """One run; returns final held-out loss and the ratio of bytes."""
    dataset = data.load("text", rank, world)
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(models.build("text", 0), bucket_cap_mb=1)
    optimizers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, peak, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, peak),
    }
    stepper = optimizers[optimizer](ddp.parameters())
    biased = gradcomp.parse_spec(spec)[0].traits.strongly_biased
    handle = gradcomp.register(ddp, spec, warmup_steps=steps // 10 if biased else 0)
    batches = torch.Generator().manual_seed(1_000_003 * seed + rank)
    rise = max(1, steps // 10)
    for step in range(steps):
        for group in stepper.param_groups:
            group["lr"] = peak * min((step + 1) / rise, (steps - step) / (steps - rise))
        inputs, targets = dataset.batch(4, batches)
        stepper.zero_grad()
        F.cross_entropy(ddp(inputs).flatten(0, -2), targets.flatten()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        stepper.step()
    with torch.no_grad():
        inputs, targets = dataset.evaluation_share(0, 1)
        loss = F.cross_entropy(ddp.module(inputs).flatten(0, -2), targets.flatten())
    return {"loss": float(loss), "ratio": handle.stats().ratio_per_step}


def main() -> None:
    """Run the grid and print one line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--specs", default=",".join(SPECS), help="compressors, without options that contain commas")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "gradcomp": gradcomp.__version__}
    for optimizer, peak, clip in SETTINGS:
        for seed in range(arguments.seeds):
            for spec in arguments.specs.split(","):
                work = (spec, optimizer, peak, clip, arguments.steps, seed)
                result = run(train, 2, *work, timeout=3600, group_timeout=600)[0]
                config = {"spec": spec, "optimizer": optimizer, "peak_lr": peak, "clip": clip, "steps": arguments.steps}
                row = {
                    "machine": machine, "versions": versions, "date": datetime.date.today().isoformat(),
                    "config": {**config, "ranks": 2}, "seed": seed, **result,
                }  # fmt: skip
                print(f"{optimizer:6} {peak:<7} clip {clip} seed {seed} {spec:9} loss {result['loss']:.4f}", flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
