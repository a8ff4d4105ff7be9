"""What each rank of the demo does: train the same model once per compressor, and report to the parent."""

from __future__ import annotations

import math
import statistics
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradcomp.demo import data, models
from gradcomp.demo.settings import Settings
from gradcomp.errors import GradcompError
from gradcomp.integrations.dispatch import register
from gradcomp.registration import Handle

Emit = Callable[[str, Any], None]
"""Send (kind, content) to the parent."""

BUCKET_MB = 1
_COMPUTE_STEPS = 8
_UNTIMED = 2  # after each change of what is exchanged: DDP rebuilds its buckets, kernels are compiled


@dataclass(kw_only=True, slots=True)
class Run:
    """What came of one compressor: plain numbers. Seconds are medians over the steady steps, bytes are per rank."""

    spec: str
    warmup_steps: int
    backend: str = ""
    schedule: str = ""
    raw_bytes_per_step: int = 0
    wire_bytes_per_step: int = 0
    wire_bytes: int = 0
    ratio: float = 1.0
    collectives_per_step: int = 0
    memory_bytes: int = 0
    step: float = math.nan
    step_p20: float = math.nan
    step_p80: float = math.nan
    encode: float = math.nan
    decode: float = math.nan
    loss: float = math.nan
    accuracy: float = math.nan
    diverged_at: int | None = None
    curve: list[tuple[int, int, float]] = field(default_factory=list)
    """(steps, bytes sent by rank 0, evaluation loss)."""
    notes: list[str] = field(default_factory=list)


def train_all(rank: int, ranks: int, emit: Emit, settings: Settings) -> None:
    """Train once per compressor; rank 0 emits ``progress``, ``run`` and, last, ``compute``."""
    dataset = data.load(settings.task, rank, ranks)
    say: Emit = emit if rank == 0 else _silent
    silent = _Trainer(dataset, settings)
    silent.ddp.register_comm_hook(None, noop_hook)
    compute: list[float] = []
    for index, spec in enumerate(settings.compressors):
        # a few each time, so that whatever else the machine does meets them as it meets the runs
        compute += _time_compute(silent)
        say("run", (index, _train(index, spec, dataset, settings, say)))
    say("compute", statistics.median(compute))


def _silent(kind: str, content: Any) -> None:
    """The other ranks have the same to say."""


class _Trainer:
    """Model, optimizer and batches, from the same seed each time it is made."""

    def __init__(self, dataset: data.Dataset, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.dataset, self.settings = dataset, settings
        # the small cap gives this small model several buckets, as a large one has
        self.ddp = DistributedDataParallel(
            models.build(settings.task, dataset.train.shape[-1]), bucket_cap_mb=BUCKET_MB
        )
        parameters = list(self.ddp.parameters())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, settings.learning_rate, momentum=0.9)
            if settings.optimizer == "sgd"
            else torch.optim.AdamW(parameters, settings.learning_rate)
        )
        self._batches = torch.Generator().manual_seed(settings.seed * 1_000_003 + dist.get_rank())

    def step(self, index: int) -> tuple[float, float, bool]:
        """One step: its seconds, its training loss on this rank, and whether the mean gradient was finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self.settings.learning_rate_factor(index)
        begun = time.perf_counter()
        inputs, targets = self.dataset.batch(self.settings.batch, self._batches)
        loss = _loss(self.ddp(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        # clipping comes after the exchange, so all ranks scale the same mean in the same way
        norm = nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        return time.perf_counter() - begun, float(loss.detach()), finite

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy on the held-out data; every rank takes its share."""
        inputs, targets = self.dataset.evaluation_share(dist.get_rank(), dist.get_world_size())
        logits = self.ddp.module(inputs)
        total = _loss(logits, targets) * targets.numel()
        right = (logits.argmax(-1) == targets).sum()
        sums = torch.tensor([float(total), float(right), float(targets.numel())], dtype=torch.float64)
        dist.all_reduce(sums)
        return float(sums[0] / sums[2]), float(sums[1] / sums[2])

    def check_ranks_agree(self, spec: str) -> None:
        """Compare the parameters of all ranks bit for bit.

        Raises:
            GradcompError: on every rank, if any differs.
        """
        mine = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in self.ddp.parameters()))
        everyone: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if len(set(everyone)) > 1:
            raise GradcompError(f"{spec}: after training the ranks hold different parameters (checksums {everyone})")


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _time_compute(trainer: _Trainer) -> list[float]:
    """Seconds of steps on all ranks at once that exchange nothing."""
    dist.barrier()
    return [trainer.step(trainer.settings.steps // 2)[0] for _ in range(_COMPUTE_STEPS)][_UNTIMED:]


def _train(index: int, spec: str, dataset: data.Dataset, settings: Settings, say: Emit) -> Run:
    run = Run(spec=spec, warmup_steps=settings.warmup_steps(spec))
    trainer = _Trainer(dataset, settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = register(
            trainer.ddp,
            spec,
            rules=settings.rules(spec),
            warmup_steps=run.warmup_steps,
            schedule=settings.schedule,
            optimizer=trainer.optimizer,
        )
    run.notes = [str(warning.message) for warning in caught if "gradcomp" in str(warning.message)]
    try:
        _run_steps(index, run, trainer, handle, settings, say)
    finally:
        handle.close()
    trainer.check_ranks_agree(spec)
    return run


def _run_steps(index: int, run: Run, trainer: _Trainer, handle: Handle, settings: Settings, say: Emit) -> None:
    steps: list[float] = []
    encode: list[float] = []
    decode: list[float] = []
    evaluate_after = settings.evaluation_steps()
    before = handle.stats()
    for step in range(settings.steps):
        seconds, loss, finite = trainer.step(step)
        after = handle.stats()
        if step >= run.warmup_steps + _UNTIMED:
            steps.append(seconds)
            encode.append(after.encode_seconds - before.encode_seconds)
            decode.append(after.decode_seconds - before.decode_seconds)
        run.collectives_per_step = after.collectives - before.collectives
        before = after
        say("progress", (index, step + 1, loss))
        if not finite:  # the same on all ranks: they hold the same mean
            run.diverged_at = step
            run.loss, run.accuracy = trainer.evaluate()
            break
        if step + 1 in evaluate_after:
            run.loss, run.accuracy = trainer.evaluate()
            run.curve.append((step + 1, after.wire_bytes, run.loss))
    if steps:
        run.step, run.encode, run.decode = (statistics.median(seconds) for seconds in (steps, encode, decode))
        run.step_p20, run.step_p80 = (sorted(steps)[int(part * len(steps))] for part in (0.2, 0.8))
    run.backend, run.schedule, run.memory_bytes = before.backend, before.schedule, before.memory_bytes
    run.wire_bytes = before.wire_bytes
    run.raw_bytes_per_step, run.wire_bytes_per_step = before.raw_bytes_per_step, before.wire_bytes_per_step
    run.ratio = before.ratio_per_step
