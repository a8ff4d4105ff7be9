"""What one rank of planner.py does: probe link, codecs and compute, then time real steps of each model and compressor.

Started once per host with a :class:`Plan` as its argument. Rank 0 prints JSON lines.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import steps
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.collectives import Group
from gradcomp.planner import probe


@dataclass(frozen=True)
class Plan:
    """``scenarios``: (name of a model below, batch). ``seconds``: of timed steps for each compressor."""

    gigabits: float
    scenarios: list[tuple[str, int]]
    specs: list[str]
    largest: float
    seconds: float = 2.0
    most_steps: int = 30
    rounds: int = 2
    seed: int = 0

    def dump(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class Small(nn.Sequential):
    """512-512-512-512-10: 0.8 M parameters, and much computation for each with a large batch."""

    def __init__(self) -> None:
        hidden = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(512, 10))

    @staticmethod
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        return torch.randn(size, 512, generator=generator), torch.randint(10, (size,), generator=generator)


MODELS: dict[str, Any] = {**steps.MODELS, "small": Small}


@dataclass
class Trial:
    """A model with its exchange."""

    spec: str
    step: Callable[[Tensor, Tensor], None]
    sent: Callable[[], float]
    count: int = 1
    seconds: list[float] = field(default_factory=list)


def make_trial(name: str, spec: str, seed: int) -> Trial:
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(MODELS[name](), init_sync=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = None if spec == "none" else gradcomp.register(ddp, spec)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()

    return Trial(spec, step, lambda: handle.stats().wire_bytes_per_step if handle is not None else 0.0)


def slowest(seconds: list[float]) -> list[float]:
    """A step takes as long as on its slowest rank."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [float(value) for value in values]


def say(**message: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(message), flush=True)


def timed(trial: Trial, batch: tuple[Tensor, Tensor]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    trial.step(*batch)
    return time.perf_counter() - begun


def measure_scenario(plan: Plan, group: Group, name: str, size: int) -> None:
    generator = torch.Generator().manual_seed(1000 * plan.seed + group.rank)
    batches = [MODELS[name].batch(size, generator) for _ in range(4)]
    turns = itertools.cycle(batches)

    def loss_of(module: nn.Module) -> Tensor:
        inputs, targets = next(turns)
        return F.cross_entropy(module(inputs), targets)

    def compute() -> dict[str, float]:
        torch.manual_seed(plan.seed)
        module = MODELS[name]()
        return probe.measure_compute(group, module, loss_of, torch.optim.SGD(module.parameters(), lr=0.01))

    before = compute()
    trials = []
    for spec in plan.specs:
        trial = make_trial(name, spec, plan.seed)
        last = 0.0
        for i in range(4):
            last = slowest([timed(trial, batches[i])])[0]
            if i >= 1 and last > plan.seconds / 2:
                break
        trial.count = max(1, min(plan.most_steps, round(plan.seconds / last)) // plan.rounds)
        trials.append(trial)
    for _ in range(plan.rounds):
        for trial in trials:
            trial.seconds += [timed(trial, batches[i % 4]) for i in range(trial.count)]
    after = compute()
    for trial in trials:
        say(
            scenario=[name, size],
            spec=trial.spec,
            step_ms=[1e3 * value for value in slowest(trial.seconds)],
            sent=trial.sent(),
        )
    # before and after the steps, so that what else the machine does meets both
    say(scenario=[name, size], compute={key: statistics.mean((before[key], after[key])) for key in before})


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    group = Group(dist.group.WORLD)  # type: ignore[arg-type]
    found = probe.measure(
        group, plan.gigabits, plan.specs, plan.largest, torch.device("cpu"), lambda line: say(note=line)
    )
    if group.rank == 0:
        with TemporaryDirectory() as folder:
            path = Path(folder, "profile.json")
            found.save(path)
            say(profile=json.loads(path.read_text()))
    for name, size in plan.scenarios:
        measure_scenario(plan, group, name, size)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort at a normal exit, after all work is done


if __name__ == "__main__":
    main()
