"""What benchmarks/accuracy.py trains: one :class:`Case` per run, and the grid of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

TASKS = ("text", "images")

# Peak learning rates, tuned in uncompressed runs on 2 ranks only (the rows of set "rates" show their neighbours).
LEARNING_RATE = {
    ("text", "sgd"): 0.3,
    ("text", "adamw"): 4e-3,
    ("text", "lamb"): 1e-2,
    ("images", "sgd"): 0.05,
    ("images", "adamw"): 4e-3,
    ("images", "lamb"): 2e-2,
}
STEPS = {"text": 300, "images": 500}
BATCH = {"text": 4, "images": 32}
"""Sequences of 64 bytes, or images, per step of all ranks together: 4 ranks see the same problem as 2."""

FAMILY = {"onebit_adam": "adamw", "zero_one_adam": "adamw", "onebit_lamb": "lamb"}
"""The uncompressed optimizer that each 1-bit optimizer is compared with."""

WARM = 0.1
"""Share of the steps that biased compressors exchange uncompressed first."""

# (spec, with uncompressed warm-up): the main settings; error feedback, warm-up and block size; further settings; a few
CORE = [
    ("none", False),
    ("fp16", False),
    ("int8", False),
    ("int4", False),
    ("onebit", True),
    ("topk:ratio=0.1", True),
    ("topk:ratio=0.01", True),
    ("topk:ratio=0.001", True),
    ("powersgd:rank=1", True),
    ("powersgd:rank=4", True),
    ("powersgd:rank=16", True),
]
VARIANTS = [
    ("int4:error_feedback=false", False),
    ("onebit:block=32", True),
    ("onebit:block=4096", True),
    ("onebit:error_feedback=false", True),
    ("onebit", False),
    ("topk:ratio=0.01,error_feedback=false", True),
    ("topk:ratio=0.01", False),
    ("powersgd:rank=4,error_feedback=false", True),
    ("powersgd:rank=4", False),
]
MORE = [
    ("bf16", False),
    ("int8:block=32", False),
    ("int8:block=4096", False),
    ("int8:error_feedback=true", False),
    ("int4:block=32", False),
    ("int4:block=4096", False),
    ("int4:error_feedback=false,stochastic=true", False),
    ("onebit:block=1024", True),
    ("topk:ratio=0.03", True),
    ("topk:ratio=0.003", True),
    ("topk:ratio=0.01,values=fp16", True),
    ("powersgd:rank=2", True),
    ("powersgd:rank=8", True),
    ("powersgd:rank=32", True),
    ("powersgd:rank=4,warm_start=false", True),
]
FEW = [
    ("none", False),
    ("int8", False),
    ("int4", False),
    ("onebit", True),
    ("topk:ratio=0.01", True),
    ("powersgd:rank=4", True),
]
STRONG = ["onebit", "topk:ratio=0.01", "powersgd:rank=4"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run. ``lr_factor``: of the tuned peak learning rate; ``warmup``: share of uncompressed first steps; ``head``: the
    output layer's own spec."""

    task: str
    optimizer: str
    spec: str
    warmup: float = 0.0
    ranks: int = 2
    lr_factor: float = 1.0
    clip: float | None = None
    head: str | None = None
    steps: int
    seed: int

    @property
    def config(self) -> dict[str, Any]:
        """Everything but the seed."""
        return {k: v for k, v in asdict(self).items() if k != "seed" and (k, v) != ("head", None)}

    @property
    def family(self) -> str:
        """The uncompressed optimizer it belongs to."""
        return FAMILY.get(self.optimizer, self.optimizer)

    @property
    def peak(self) -> float:
        """Peak learning rate."""
        return LEARNING_RATE[self.task, self.family] * self.lr_factor

    @property
    def warmup_steps(self) -> int:
        """Steps exchanged uncompressed; for 1-bit optimizers the exact stage."""
        return round(self.warmup * self.steps)

    @property
    def rules(self) -> list[tuple[str, str]]:
        """For gradcomp."""
        return [("head.weight", self.head)] if self.head else []

    def learning_rate(self, step: int) -> float:
        """It rises over a tenth of the steps and then falls linearly to zero."""
        rise = max(1, self.steps // 10)
        return self.peak * min((step + 1) / rise, (self.steps - step) / (self.steps - rise))

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """torch's SGD with momentum, or AdamW."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, self.peak, momentum=0.9)
        return torch.optim.AdamW(parameters, self.peak)


def case(task: str, optimizer: str, spec: str, seed: int, **options: Any) -> Case:
    """A case with the task's number of steps. Transformers under SGD need clipping; nothing else is clipped."""
    clip = 1.0 if (task, optimizer) == ("text", "sgd") else None
    return Case(
        **{"task": task, "optimizer": optimizer, "spec": spec, "seed": seed, "clip": clip, "steps": STEPS[task]}
        | options
    )


def _grid(specs: list[tuple[str, bool]], seed: int, **options: Any) -> Iterator[Case]:
    for spec, warm in specs:
        for task in TASKS:
            for optimizer in ("sgd", "adamw"):
                yield case(task, optimizer, spec, seed, warmup=WARM if warm else 0.0, **options)


def _optimizers(seed: int, **options: Any) -> Iterator[Case]:
    for task in TASKS:
        yield case(task, "lamb", "none", seed, **options)
        for optimizer in FAMILY:
            yield case(task, optimizer, "onebit", seed, warmup=0.2, **options)


def _rates(seed: int) -> Iterator[Case]:
    """The tuned learning rate's neighbours, and one that is too high."""
    for task, factor in (("text", 0.5), ("images", 0.5), ("text", 2.0), ("images", 2.0), ("text", 4.0)):
        for spec, warm in FEW:
            for optimizer in ("sgd", "adamw"):
                yield case(task, optimizer, spec, seed, warmup=WARM if warm else 0.0, lr_factor=factor)


def _heads(seed: int) -> Iterator[Case]:
    """The output layer with int8, everything else strongly compressed."""
    for spec in STRONG:
        for task in TASKS:
            for optimizer in ("sgd", "adamw"):
                yield case(task, optimizer, spec, seed, warmup=WARM, head="int8")


def _long(seed: int) -> Iterator[Case]:
    """Four times as many steps: what error feedback holds back is a smaller part of a longer run."""
    for spec, warm in FEW:
        yield case("text", "sgd", spec, seed, warmup=WARM if warm else 0.0, steps=4 * STEPS["text"])


def grid(name: str, seeds: int) -> list[Case]:
    """A set of cases by name, seed by seed; ``all``: the most wanted first."""
    parts: dict[str, Callable[[int], Iterator[Case]]] = {
        "core": lambda seed: chain(_grid(CORE, seed), _optimizers(seed)),
        "heads": _heads,
        "variants": lambda seed: _grid(VARIANTS, seed),
        "ranks": lambda seed: chain(_grid(FEW, seed, ranks=4), _optimizers(seed, ranks=4)),
        "long": _long,
        "more": lambda seed: _grid(MORE, seed),
        "rates": _rates,
    }
    if name != "all":
        return [c for seed in range(seeds) for c in parts[name](seed)]
    others = [n for n in parts if n != "core"]
    return grid("core", seeds) + [c for seed in range(seeds) for n in others for c in parts[n](seed)]


def quick() -> list[Case]:
    """One run of a few steps of each kind."""
    few = [case("text", "sgd", "none", 0), case("text", "sgd", "onebit", 0, warmup=0.5, head="int8")]
    few += [case("images", "adamw", "topk:ratio=0.01", 0)]
    few += [case("images", optimizer, "onebit", 0, warmup=0.5) for optimizer in FAMILY]
    return [replace(c, steps=6) for c in few]
