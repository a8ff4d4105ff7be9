"""What the multi-process tests share: models, data, training loops and checks that run on every rank.

A worker runs many cases in one launch (:func:`battery`), because starting ranks costs seconds and a case milliseconds.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
from gradcomp import Handle
from gradcomp.bucket import Parameter, ParameterTable
from gradcomp.collectives import Group
from gradcomp.memory import Memory
from gradcomp.registry import get_compressor
from gradcomp.testing import launch

BACKEND = "auto"
CAP_MB = 0.01
"""Bucket size: one layer of :class:`Net` fills a bucket."""
SCHEDULES = ("inline", "pipeline:depth=1", "pipeline:depth=3", "thread")
VARIANTS = ("fp16:accumulate=wire", "int8:stochastic=true", "topk:ratio=0.05,select=exact,index=int32,values=fp16")


def feedback_specs() -> list[str]:
    """Every registered compressor that can keep residuals, with error feedback on."""
    specs = []
    for name in gradcomp.compressor_names():
        config = get_compressor(name).Config
        if "error_feedback" in {field.name for field in fields(config)}:
            specs.append(gradcomp.format_spec(replace(config(), error_feedback=True)))
    return specs


def all_specs() -> list[str]:
    """Every registered compressor by its defaults, those with error feedback, and other branches of their code."""
    return list(dict.fromkeys([*gradcomp.compressor_names(), *feedback_specs(), *VARIANTS]))


# ---------------------------------------------------------------- running
def battery(rank: int, world: int, cases: Mapping[Any, tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[Any, Any]:
    """Run ``fn(rank, world, *args)`` for every case; an exception is a case's result, not the end."""
    results: dict[Any, Any] = {}
    for key, (fn, args) in cases.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                results[key] = (True, fn(rank, world, *args))
        except Exception as error:
            trace = traceback.extract_tb(error.__traceback__)[-1]
            results[key] = (False, f"{type(error).__name__}: {error} ({trace.filename}:{trace.lineno})")
        try:
            dist.barrier()
        except RuntimeError as error:  # the ranks have parted: no case after this one can run
            rest = {key: (False, f"not run, the ranks parted before: {error}") for key in cases if key not in results}
            return {**results, **rest}
    return results


class Battery:
    """Runs ``cases`` in one launch when the first result is asked for."""

    def __init__(
        self, world: int, cases: Mapping[Any, tuple[Callable[..., Any], tuple[Any, ...]]], **options: Any
    ) -> None:
        self.world, self.cases, self.options = world, dict(cases), options
        self._outcomes: list[Any] | None = None

    def __getitem__(self, key: Any) -> list[Any]:
        """The value that each rank returned for a case."""
        if self._outcomes is None:
            self._outcomes = launch(battery, self.world, self.cases, **self.options)
        results = [outcome.value[key] if outcome.ok else (False, outcome.error) for outcome in self._outcomes]
        errors = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(results) if not ok]
        if errors:  # not an AssertionError: an expected failure must not hide it
            raise RuntimeError("; ".join(errors))
        return [value for _, value in results]


# ---------------------------------------------------------------- models and data
class Net(nn.Module):
    """Five layers of equal and unequal shapes; biases and the last layer are too small to be compressed."""

    def __init__(self, seed: int = 0, width: int = 64) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            sizes = [32, width, width, width, width, 4]
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        """``skip`` leaves out the third layer, so its parameters are unused in this step."""
        for i, layer in enumerate(self.layers):
            if not (skip and i == 2):
                x = layer(x) if i == len(self.layers) - 1 else torch.tanh(layer(x))
        return x


def batch(step: int, rank: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs and targets that differ by step and rank; the targets are learnable."""
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    teacher = torch.randn(32, 4, generator=torch.Generator().manual_seed(5)) / 6
    return x, torch.tanh(x @ teacher)


def loss_of(model: nn.Module, step: int, rank: int, **forward: Any) -> Tensor:
    """The loss of this rank in this step."""
    x, y = batch(step, rank)
    return nn.functional.mse_loss(model(x, **forward).float(), y)


def wrap(model: nn.Module, **options: Any) -> DDP:
    """The model in DDP with several buckets."""
    return DDP(model, **{"bucket_cap_mb": CAP_MB, **options})


def setup(
    spec: gradcomp.registration.SpecLike, *, seed: int = 0, ddp: Mapping[str, Any] | None = None, **options: Any
) -> tuple[DDP, torch.optim.Optimizer, Handle]:
    """A :class:`Net` in DDP, its optimizer, and the handle."""
    model = wrap(Net(seed), **(ddp or {}))
    handle = gradcomp.register(model, spec, backend=BACKEND, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), handle


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, **forward: Any) -> list[float]:
    """Plain training; returns the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step, rank, **forward)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------- checks
def digest(model: nn.Module) -> str:
    """A hash of every bit of the parameters."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, in double precision."""
    module = model.module if isinstance(model, DDP) else model
    return {n: p.grad.detach().double().clone() for n, p in module.named_parameters() if p.grad is not None}


def mean_over_ranks(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The exact mean of every rank's ``values``."""
    means = {}
    for name, value in values.items():
        means[name] = value.clone()
        dist.all_reduce(means[name])
        means[name] /= dist.get_world_size()
    return means


def local_gradients(ddp: DDP, step: int, rank: int, **forward: Any) -> dict[str, Tensor]:
    """What this rank's gradients are before any exchange, from a copy of the module outside DDP."""
    module = copy.deepcopy(ddp.module)
    module.zero_grad()
    loss_of(module, step, rank, **forward).backward()
    return gradients(module)


def table_of(model: nn.Module) -> ParameterTable:
    """The parameters as the engine sees them."""
    return ParameterTable([Parameter(n, p.numel(), tuple(p.shape), p.dtype) for n, p in model.named_parameters()])


def total_residual(states: Sequence[Mapping[str, Any]], model: nn.Module) -> dict[str, Tensor]:
    """What error feedback holds back of the mean: mean over ranks of worker + sum of server residuals."""
    table = table_of(model)
    total = {n: torch.zeros(p.numel(), dtype=torch.float64) for n, p in model.named_parameters()}
    for state in states:
        held = Memory(table, state["rank"], state["world"])
        held.load_state_dicts([state], exact=False)  # makes server residual worker residual, times the world size
        for name, values in total.items():
            worker = held.read_worker(name)
            if worker is not None:
                values += worker.double() / len(states)
    return {n: total[n].view(p.shape) for n, p in model.named_parameters()}


def gathered_residual(handle: Handle, ddp: DDP) -> dict[str, Tensor]:
    """:func:`total_residual` of all ranks' current states. Collective."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, handle.state_dict())
    return total_residual(states, ddp.module)


def worst(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Largest difference between two sets of tensors."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@contextmanager
def recorded_requests() -> Iterator[list[tuple[str, int]]]:
    """Every collective that this rank issues meanwhile, in order: kind and size."""
    requests: list[tuple[str, int]] = []
    original = Group.start

    def start(self: Group, request: Any) -> Any:
        requests.append((type(request).__name__, request.wire_bytes(self.world)))
        return original(self, request)

    Group.start = start  # type: ignore[method-assign]
    try:
        yield requests
    finally:
        Group.start = original  # type: ignore[method-assign]


def without_sync(ddp: DDP, condition: bool) -> Any:
    """``ddp.no_sync()`` where ``condition`` holds."""
    return ddp.no_sync() if condition else nullcontext()
