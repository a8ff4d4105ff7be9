"""What each rank of benchmarks/accuracy.py does: one training run per case, on real data that needs no download."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from accuracy_cases import BATCH, Case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.demo import data
from gradcomp.demo.models import ByteTransformer
from gradcomp.optim import OneBitAdam, OneBitLamb, ZeroOneAdam

_EVALUATE_AT_ONCE = 500


class ConvNet(nn.Module):
    """Two strided convolutions and a perceptron, for square images in 10 classes: 0.21 M parameters at 28 x 28."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden = nn.Linear(32 * ((side + 3) // 4) ** 2, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        logits: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return logits


def build(dataset: data.Dataset) -> nn.Module:
    """The model for this data: a transformer of 0.28 M parameters over bytes, or :class:`ConvNet`."""
    if dataset.train_labels is None:
        return ByteTransformer(width=96, layers=2)
    return ConvNet(dataset.train.shape[-1])


@cache
def load(task: str, rank: int, ranks: int, full: bool) -> data.Dataset:
    """This rank's share; kept for the next cases."""
    return data.load(task, rank, ranks, full=full)


def work(rank: int, ranks: int, emit: Callable[[str, Any], None], cases: list[Case], full: bool) -> None:
    """Train every case; rank 0 emits ("row", (case, results)) after each."""
    warnings.filterwarnings("ignore", "gradcomp: ")  # that 1-bit under Adam costs quality is what is measured here
    for case in cases:
        result = train(case, rank, load(case.task, rank, ranks, full))
        if rank == 0:
            emit("row", (case, result))


def train(case: Case, rank: int, dataset: data.Dataset) -> dict[str, Any]:
    """One run: final losses, accuracy, bytes sent by this rank."""
    torch.manual_seed(case.seed)
    ddp = DistributedDataParallel(build(dataset))
    optimizer = _optimizer(case, ddp)
    handle = None
    if isinstance(optimizer, torch.optim.SGD | torch.optim.AdamW):
        handle = gradcomp.register(ddp, case.spec, warmup_steps=case.warmup_steps, rules=case.rules)
    batches = torch.Generator().manual_seed(1_000_003 * case.seed + rank)
    losses: list[float] = []
    diverged_at = None
    begun = time.perf_counter()
    for step in range(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = case.learning_rate(step)
        inputs, targets = dataset.batch(BATCH[case.task] // case.ranks, batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(inputs).flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if case.clip is not None:
            nn.utils.clip_grad_norm_(ddp.parameters(), case.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        if handle is not None and not handle.last_step_finite:  # the same on all ranks
            diverged_at = step
            break
    seconds = time.perf_counter() - begun
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.synchronize()
    sums = evaluate_share(ddp.module, dataset, rank, case.ranks)
    dist.all_reduce(sums)
    late = losses[-max(1, case.steps // 10) :]
    stats: Any = optimizer.stats() if handle is None else handle.stats()  # type: ignore[attr-defined]
    if handle is not None:
        handle.close()
    numel = sum(p.numel() for p in ddp.parameters())
    return {
        "loss": number(float(sums[0] / sums[2])),
        "accuracy": float(sums[1] / sums[2]),
        "train_loss": number(_mean(sum(late) / len(late))),
        "diverged_at": diverged_at,
        "wire_bytes": stats.wire_bytes,
        "raw_bytes": stats.raw_bytes,
        "ratio": stats.ratio,
        "ratio_per_step": stats.ratio_per_step,
        "compressed": 1 - sum(p.numel() for n, p in ddp.module.named_parameters() if n in stats.bypassed) / numel,
        "parameters": numel,
        "run_s": seconds,
    }


def _optimizer(case: Case, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"module": ddp, "weight_decay": 0.01}
    exact = case.warmup_steps
    match case.optimizer:
        case "sgd" | "adamw":
            return case.make_optimizer(ddp.parameters())
        case "lamb":  # never frozen
            return OneBitLamb(ddp.parameters(), case.peak, freeze_step=case.steps + 1, **options)
        case "onebit_lamb":
            return OneBitLamb(ddp.parameters(), case.peak, freeze_step=exact, compressor=case.spec, **options)
        case "onebit_adam":
            return OneBitAdam(ddp.parameters(), case.peak, freeze_step=exact, compressor=case.spec, **options)
        case "zero_one_adam":
            return ZeroOneAdam(
                ddp.parameters(), case.peak, var_freeze_step=exact, compressor=case.spec,
                local_step_scaler=case.steps // 4, local_step_clipper=4, **options,
            )  # fmt: skip
    raise ValueError(case.optimizer)


@torch.no_grad()
def evaluate_share(model: nn.Module, dataset: data.Dataset, rank: int, ranks: int) -> Tensor:
    """Sum of losses in nats, right answers and answers, fp64 [3], on this rank's share of the held-out data."""
    inputs, targets = dataset.evaluation_share(rank, ranks)
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in zip(inputs.split(_EVALUATE_AT_ONCE), targets.split(_EVALUATE_AT_ONCE), strict=True):
        logits = model(x)
        sums[0] += F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum").double()
        sums[1] += (logits.argmax(-1) == y).sum()
        sums[2] += y.numel()
    return sums


def _mean(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def number(value: float) -> float | None:
    return value if math.isfinite(value) else None
