"""What the tests of the trainers share: a task, its data in the order in which each trainer deals it out, and the same training
written out in plain PyTorch, whose parameters a trainer must reach bit for bit."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import workers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import gradcomp

ROOT = Path(__file__).resolve().parents[1]
WORLD, ROWS, STEPS = 2, 8, 6
"""Ranks, samples per batch and rank, batches per rank and epoch."""
ACCUMULATE, CLIP = 2, 0.05
TIMEOUT = 250
"""Seconds for all cases of one trainer, on a machine that is busy; they need a tenth of it."""
LOGGED = {f"gradcomp/{name}" for name in ("wire_bytes", "ratio_per_step", "residual_ratio", "skipped_steps")}
EXACT = [
    *((spec, options) for spec in ("int8", "onebit") for options in ({}, {"accumulate": ACCUMULATE}, {"clip": CLIP})),
    ("int8", {"bf16": True}), ("onebit", {"bf16": True}), ("onebit", {"bf16": True, "accumulate": ACCUMULATE, "clip": CLIP}),
]  # fmt: skip
"""Compressor, and options of :func:`plain` with which each trainer is compared."""


SHARDED = ("int8", "bf16", "onebit:error_feedback=true")
"""Compressors with which FSDP2 is tried inside each trainer."""


def name_of(case: tuple[str, Mapping[str, Any]]) -> str:
    return "-".join([case[0], *case[1]])


class Task(nn.Module):
    """A model that returns its loss, as the Transformers Trainer wants it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = workers.Net(seed)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x).float(), y)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def data(by: str) -> TensorDataset:
    """One epoch: rank r's step s gets ``workers.batch(s, r)`` from a trainer that deals out single samples (``by="sample"``)
    or whole batches (``"batch"``) in turn."""
    batches = {(s, r): workers.batch(s, r, ROWS) for s in range(STEPS) for r in range(WORLD)}
    if by == "batch":
        order = [(s, r, row) for s in range(STEPS) for r in range(WORLD) for row in range(ROWS)]
    else:
        order = [(s, r, row) for s in range(STEPS) for row in range(ROWS) for r in range(WORLD)]
    return TensorDataset(
        torch.stack([batches[s, r][0][row] for s, r, row in order]),
        torch.stack([batches[s, r][1][row] for s, r, row in order]),
    )


def plain(rank: int, spec: str, *, accumulate: int = 1, clip: float = 0.0, bf16: bool = False, epochs: int = 1) -> str:
    """Train in plain PyTorch; returns the parameters' digest."""
    ddp = DistributedDataParallel(Task())
    gradcomp.register(ddp, spec)
    optimizer = sgd(ddp)
    for i in range(epochs * STEPS):
        x, y = workers.batch(i % STEPS, rank, ROWS)
        last = (i + 1) % accumulate == 0
        with nullcontext() if last else ddp.no_sync():
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                loss = ddp(x, y)["loss"]
            (loss / accumulate).backward()
        if last:
            if clip:
                nn.utils.clip_grad_norm_(ddp.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return workers.digest(ddp.module)


def as_launched(rank: int, world: int) -> None:
    """The variables that torchrun sets; no model is looked for on a hub, and no log is written to the terminal."""
    logging.disable(logging.WARNING)
    # on the path, the root's folder `kernels` would shadow the package that transformers looks for
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), NODE_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", HF_HUB_OFFLINE="1",
    )  # fmt: skip


@contextmanager
def only_our_warnings() -> Iterator[list[str]]:
    """Trainers warn of much; gradcomp's warnings are collected, and the rest is ignored."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message="gradcomp")
        said: list[str] = []
        yield said
        said += [str(warning.message) for warning in caught]


def snippets(section: str) -> list[str]:
    """The code of a section of integrations/README.md, diffs applied."""
    text = (ROOT / "integrations" / "README.md").read_text()
    body = text[text.index(f"\n## {section}\n") + 1 :].partition("\n## ")[0]
    codes = []
    for kind, code in re.findall(r"```(python|diff)\n(.*?)```", body, re.DOTALL):
        lines = code.splitlines()
        codes.append("\n".join(line[1:] for line in lines if line[:1] != "-") if kind == "diff" else code)
    return codes


def documented(rank: int, world: int, section: str, folder: str) -> list[tuple[int, str]]:
    """Run a section's snippets as they stand there; of those that train, the bytes sent and the parameters' digest."""
    as_launched(rank, world)
    before = os.getcwd()
    os.chdir(folder)
    results = []
    try:
        for number, code in enumerate(snippets(section)):
            torch.manual_seed(0)
            names: dict[str, Any] = {"__name__": f"{section} {number}", "print": lambda *args: None}
            sys.modules[names["__name__"]] = type(sys)(names["__name__"])
            with only_our_warnings() as said:
                exec(compile(code, names["__name__"], "exec"), names)
            assert said == []
            if "handle" in names:
                results.append((names["handle"].stats().wire_bytes, workers.digest(names["model"])))
    finally:
        os.chdir(before)
    return results


def whole(model: nn.Module) -> nn.Module:
    """A copy of a model that FSDP2 may have sharded, with whole parameters. Collective."""
    copy = Task()
    state = {name.removeprefix("task."): value for name, value in model.state_dict().items()}
    copy.load_state_dict({n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()})
    return copy


def error_of(call: Callable[[], Any]) -> str:
    """What ``call`` raises, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
