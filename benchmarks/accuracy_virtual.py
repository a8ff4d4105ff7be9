"""The same training as in accuracy_train.py with virtual ranks: the library's engine drives them in one process.

Same data, order of batches, codecs, residuals and bytes as with real ranks; only the sums of the uncompressed exchange may
be rounded otherwise. It takes a third of the processor time, so that many seeds and settings can be tried on a busy machine.
The 1-bit optimizers need real ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from accuracy_cases import BATCH, Case
from accuracy_train import build, evaluate_share, load, number
from torch import Tensor, nn
from torch.nn import functional as F

from gradcomp.bucket import Parameter
from gradcomp.testing import VirtualBucket


def work(cases: list[Case], full: bool) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Train every case, yielding results as they come."""
    torch.set_num_threads(1)
    for case in cases:
        yield case, train(case, full)


def train(case: Case, full: bool) -> dict[str, Any]:
    """As :func:`accuracy_train.train`."""
    datasets = [load(case.task, rank, case.ranks, full) for rank in range(case.ranks)]
    torch.manual_seed(case.seed)
    model = build(datasets[0])
    parameters = list(model.parameters())
    optimizer = case.make_optimizer(parameters)
    table = [
        Parameter(name, p.numel(), tuple(p.shape), p.dtype, name == "embedding.weight")
        for name, p in model.named_parameters()
    ]
    compressed = VirtualBucket(case.spec, table, case.ranks, rules=case.rules)
    exact = VirtualBucket("none", table, case.ranks)
    batches = [torch.Generator().manual_seed(1_000_003 * case.seed + rank) for rank in range(case.ranks)]
    losses: list[float] = []
    diverged_at, begun = None, time.perf_counter()
    for step in range(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = case.learning_rate(step)
        gradients, loss = [], 0.0
        for dataset, generator in zip(datasets, batches, strict=True):
            inputs, targets = dataset.batch(BATCH[case.task] // case.ranks, generator)
            optimizer.zero_grad()
            mine = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            mine.backward()  # type: ignore[no-untyped-call]
            gradients.append(torch.cat([_gradient(p).flatten() for p in parameters]))
            loss += float(mine.detach()) / case.ranks
        losses.append(loss)
        bucket = exact if step < case.warmup_steps else compressed
        mean = bucket.step(gradients)[0]
        exact.steps = compressed.steps = step + 1
        for p, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            _gradient(p).copy_(part.view_as(p))
        if case.clip is not None:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        optimizer.step()
        if not bool(mean.isfinite().all()):
            diverged_at = step
            break
    seconds = time.perf_counter() - begun
    sums = sum((evaluate_share(model, dataset, r, case.ranks) for r, dataset in enumerate(datasets)), torch.zeros(3))
    late = losses[-max(1, case.steps // 10) :]
    raw = 8 * (case.ranks - 1) * compressed.numel // case.ranks
    wire = exact.group.bytes_sent + compressed.group.bytes_sent
    ran = case.steps if diverged_at is None else diverged_at + 1
    chosen = [p.numel for p in table if compressed.choices[p.name].bypassed is None]
    per_step = compressed.group.bytes_sent / max(1, ran - case.warmup_steps)
    return {
        "loss": number(float(sums[0] / sums[2])),
        "accuracy": float(sums[1] / sums[2]),
        "train_loss": number(sum(late) / len(late)),
        "diverged_at": diverged_at,
        "wire_bytes": wire,
        "raw_bytes": raw * ran,
        "ratio": raw * ran / wire,
        "ratio_per_step": raw / per_step,
        "compressed": sum(chosen) / compressed.numel,
        "parameters": compressed.numel,
        "run_s": seconds,
    }


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
