"""Bytes: what stats() reports is what the network interface counts, and PowerSGD's volumes are those of its paper."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from torch import nn

import gradcomp
from gradcomp.testing import VirtualBucket, run

SPECS = ["none", "fp16", "fp16:accumulate=wire", "int8", "onebit", "topk:ratio=0.02", "powersgd:rank=32"]
STEPS = 3
SIZES = [1024, 1024, 1024, 640]
"""Layers of about 1.7 million weights: large enough that TCP and IP headers do not show."""


def counter() -> int:
    """Bytes that the loopback interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("no loopback interface")


def measured(rank: int, world: int) -> dict[str, Any]:
    """For each spec: bytes on the interface (of all ranks), wire_bytes and raw_bytes (of this rank) in some steps."""
    results = {}
    for spec in SPECS:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)))
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25)
        handle = gradcomp.register(ddp, spec, backend=workers.BACKEND)
        x = torch.randn(2, SIZES[0])
        before, sent, raw = 0, 0, 0
        for step in range(2 + STEPS):
            if step == 2:  # buckets are final and the ranks have agreed on them
                dist.barrier()
                before, sent, raw = counter(), handle.stats().wire_bytes, handle.stats().raw_bytes
                dist.barrier()
            ddp.zero_grad()
            ddp(x).square().mean().backward()
        sent, raw = handle.stats().wire_bytes - sent, handle.stats().raw_bytes - raw
        dist.barrier()
        on_wire = counter() - before
        dist.barrier()
        idle = counter()
        dist.barrier()
        dist.barrier()
        results[spec] = {"wire": on_wire, "idle": counter() - idle, "sent": sent, "raw": raw}
        handle.close()
    return results


def main(world: int) -> None:
    """Run in a network namespace of its own, so that nobody else's traffic is counted."""
    print(json.dumps(run(measured, world)))


def why_not() -> str | None:
    """Why this machine cannot give a process its own loopback interface."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return "needs the programs unshare and ip for a network namespace"
    if os.geteuid() != 0:
        return "needs root for a network namespace"
    if subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces"
    return None


_measured: dict[int, Any] = {}


def on_own_network(world: int) -> Any:
    if world not in _measured:
        code = f"import test_bytes; test_bytes.main({world})"
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
        done = subprocess.run(
            ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, code],
            env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        _measured[world] = json.loads(done.stdout)
    return _measured[world]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_wire_bytes_are_what_the_interface_counts(world: int, spec: str) -> None:
    results = [result[spec] for result in on_own_network(world)]
    on_wire = results[0]["wire"] - results[0]["idle"]
    sent = sum(result["sent"] for result in results)
    assert on_wire == pytest.approx(sent, rel=0.03)
    parameters = sum(a * b + b for a, b in itertools.pairwise(SIZES))
    for result in results:
        assert result["raw"] == pytest.approx(STEPS * 2 * (world - 1) / world * 4 * parameters, rel=1e-6)
    if spec == "none":
        assert sent == sum(result["raw"] for result in results)


# ---------------------------------------------------------------- PowerSGD, Table 3
def resnet18() -> list[tuple[int, ...]]:
    """The 62 parameters of ResNet-18 as the paper trains it on CIFAR-10: 3x3 stem, 10 classes."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize(("rank", "times"), [(1, 243), (2, 136), (4, 72)])
def test_powersgd_sends_what_table_3_of_its_paper_says(rank: int, times: int) -> None:
    shapes = resnet18()
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    assert (len(shapes), numel) == (62, 11_173_962)
    world = 2
    bucket = VirtualBucket(f"powersgd:rank={rank}", shapes, world, backend=workers.BACKEND)
    gradients = [torch.randn(numel) for _ in range(world)]
    bucket.step(gradients)  # the first step also checks that the ranks agree on the bucket
    before = bucket.group.bytes_sent
    bucket.step(gradients)
    sent = bucket.group.bytes_sent - before
    raw = 2 * (world - 1) * 4 * numel // world
    assert raw / sent == pytest.approx(times, abs=1)
