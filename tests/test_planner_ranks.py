"""The planner against real ranks: bytes on the interface, bytes in stats(), the probe, and tuning a running job."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_bytes
import torch
import torch.distributed as dist
import workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
from gradcomp.collectives import Group
from gradcomp.planner import Autotune, Job, Model, assumed_network, predict
from gradcomp.planner import autotune as tuning
from gradcomp.planner.payload import ddp_buckets, dry_run
from gradcomp.planner.probe import measure, measure_compute
from gradcomp.planner.profile import Curve
from gradcomp.testing import run

# ------------------------------------------------------------------------ plain trainers, at the network interface
SIZES = [1024, 1024, 1024, 640]
STEPS = 3
SCHEMES = ["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "fsdp2-keep"]
COMPRESSED = ["zero1:int8", "zero2:onebit", "zero3:int8", "fsdp2:int8", "fsdp2-int8:int8"]
"""Trainers with gradcomp in them."""


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)))


def on_the_interface(step: Any) -> float:
    """Bytes per step that the loopback interface sends for all ranks, after two steps that do not count."""
    step()
    step()
    dist.barrier()
    before = test_bytes.counter()
    dist.barrier()
    for _ in range(STEPS):
        step()
    dist.barrier()
    after = test_bytes.counter()
    dist.barrier()
    idle = test_bytes.counter()
    dist.barrier()
    dist.barrier()
    return (after - before - (test_bytes.counter() - idle)) / STEPS


def plain_steps(rank: int, world: int, schemes: list[str]) -> dict[str, float]:
    return {scheme: on_the_interface(make_step(scheme, rank, world)) for scheme in schemes}


def make_step(scheme: str, rank: int, world: int) -> Any:
    x, module = torch.randn(2, SIZES[0]), make_layers()
    scheme, _, spec = scheme.partition(":")
    if scheme.startswith("zero"):
        engine = make_engine(module, int(scheme[-1]), rank, world)
        if spec:
            gradcomp.register(engine, spec, backend=workers.BACKEND)

        def step_engine() -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        return step_engine
    model: nn.Module = module
    if scheme == "ddp":
        model = DDP(module)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for layer in [*module, module]:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=scheme != "fsdp2-keep")
    if spec:
        gradcomp.register(model, spec, backend=workers.BACKEND)
    if scheme == "fsdp2-int8":
        from gradcomp.integrations.fsdp import register_all_gather

        register_all_gather(model, backend=workers.BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def make_engine(module: nn.Module, stage: int, rank: int, world: int) -> Any:
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed("gloo")
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:  # a small model would otherwise stay gathered between forward and backward
        zero |= {
            "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }  # fmt: skip
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    engine: Any = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    return engine


def main(world: int, schemes: str) -> None:
    """In a network namespace of its own, so that nobody else's traffic is counted."""
    print("RESULT " + json.dumps(run(plain_steps, world, schemes.split(","), timeout=110)[0]))


_measured: dict[int, dict[str, float]] = {}


def on_own_network(world: int) -> dict[str, float]:
    if world not in _measured:
        try:
            import deepspeed  # noqa: F401
        except ImportError:
            schemes = [scheme for scheme in [*SCHEMES, *COMPRESSED] if not scheme.startswith("zero")]
        else:
            schemes = [*SCHEMES, *COMPRESSED]
        code = f"import test_planner_ranks; test_planner_ranks.main({world}, {','.join(schemes)!r})"
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
        done = subprocess.run(
            ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, code],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"},
            capture_output=True, text=True, check=False, timeout=115,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        _measured[world] = json.loads(done.stdout.split("RESULT ")[1])
    return _measured[world]


@pytest.mark.skipif(test_bytes.why_not() is not None, reason=str(test_bytes.why_not()))
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_trainers_send_what_the_planner_says(world: int, scheme: str) -> None:
    if scheme.startswith("zero"):
        pytest.importorskip("deepspeed", reason="needs the extra gradcomp[deepspeed]")
    sent = on_own_network(world)[scheme] / world
    job = Job(model=Model.of(make_layers()), gpus=world, network=assumed_network(1.0), precision="fp32", backend="gloo",
              device="cpu")  # fmt: skip
    planned = predict(job, "ddp" if scheme == "zero0" else scheme, "none").bytes_per_rank
    assert sent == pytest.approx(planned, rel=0.03)
    # and in the units of the formulas: f n 4 bytes, of which gloo needs two for a reduce-scatter
    units = {"ddp": 2, "zero0": 2, "zero1": 3, "zero2": 3, "zero3": 4, "fsdp2": 4, "fsdp2-keep": 3}[scheme]
    n = sum(a * b + b for a, b in itertools.pairwise(SIZES))
    assert sent == pytest.approx(units * (world - 1) / world * 4 * n, rel=0.03)


@pytest.mark.skipif(test_bytes.why_not() is not None, reason=str(test_bytes.why_not()))
@pytest.mark.parametrize("what", COMPRESSED)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_trainers_with_gradcomp_send_what_the_planner_says(world: int, what: str) -> None:
    scheme, _, spec = what.partition(":")
    if scheme.startswith("zero"):
        pytest.importorskip("deepspeed", reason="needs the extra gradcomp[deepspeed]")
    sent = on_own_network(world)[what] / world
    job = Job(model=Model.of(make_layers()), gpus=world, network=assumed_network(1.0), precision="fp32", backend="gloo",
              device="cpu")  # fmt: skip
    assert sent == pytest.approx(predict(job, scheme, spec).bytes_per_rank, rel=0.03)


# ------------------------------------------------------------------------ compressed, against stats()
class Mixed(nn.Module):
    """An embedding, matrices of several shapes, a convolution, vectors and small parameters, in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(500, 96)
        self.body = nn.Sequential(nn.Linear(96, 200), nn.LayerNorm(200), nn.Linear(200, 144), nn.Linear(144, 331))
        self.conv = nn.Conv1d(1, 24, 5)
        self.head = nn.Linear(24, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(tokens))
        return self.head(self.conv(hidden.unsqueeze(1)).mean(-1))


SPECS = workers.all_specs()
CAP_MB = 0.2


def stats_of(rank: int, world: int, spec: str) -> tuple[int, int]:
    """Bytes and residual memory of a steady step."""
    ddp = DDP(Mixed(), bucket_cap_mb=CAP_MB)
    handle = gradcomp.register(ddp, spec, backend=workers.BACKEND)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.arange(6) + rank).square().mean().backward()
        optimizer.step()
    stats = handle.stats()
    names = [sorted(names) for names in handle.buckets]
    model = Model.of(ddp.module)
    parameters = model.parameters(torch.float32)
    cap = int(CAP_MB * (1 << 20))
    planned = [sorted(p.name for p in bucket) for bucket in ddp_buckets(parameters, cap, cap)]
    assert names == planned, (names, planned)
    handle.close()
    return stats.wire_bytes_per_step, stats.memory_bytes


SCATTERED = ["none", "int8", "onebit", "int4:error_feedback=true"]


def stats_of_fsdp(rank: int, world: int, spec: str) -> tuple[int, int]:
    """The same for FSDP2, whose reduce-scatter is compressed."""
    import warnings

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(a, b) for a, b in ((96, 200), (200, 144), (144, 331))))
    for layer in [*model, model]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gradcomp: error feedback in FSDP2")
        handle = gradcomp.register(model, spec, backend=workers.BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 96)).square().mean().backward()
        optimizer.step()
    stats = handle.stats()
    return stats.wire_bytes_per_step, stats.memory_bytes


def probed(rank: int, world: int) -> Any:
    """A quick probe."""
    group = Group(dist.group.WORLD)  # type: ignore[arg-type]
    module = nn.Linear(64, 64)
    x = torch.randn(4, 64)

    def compute() -> Any:
        return measure_compute(group, module, lambda m: m(x).sum(), torch.optim.SGD(module.parameters(), 0.1), steps=5)

    said: list[str] = []
    found = measure(group, 1.0, ["none", "int8"], 4096.0 * 64, torch.device("cpu"), said.append, compute)
    return found, said


def tuned(rank: int, world: int, gigabits: float, safe: bool, optimum: bool) -> Any:
    """Train a few steps on a link that is said to have this speed; returns the decision, and whether ranks agree."""
    rate = 1e9 * gigabits / 8

    def pretend(group: Group, device: Any, largest: float, say: Any, kinds: Any) -> dict[str, Curve]:
        line = Curve.fit([(x, 1e-4 + x / rate) for x in (1e4, 1e6)])
        return dict.fromkeys(kinds, line)

    original, tuning.measure_collectives = tuning.measure_collectives, pretend
    try:
        ddp = DDP(Mixed())
        handle = gradcomp.register(ddp, "none", backend=workers.BACKEND)
        tuner = Autotune(handle, steps=3, safe=safe)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        decisions = []
        for step in range(10):
            optimizer.zero_grad()
            ddp(torch.arange(6) + rank + step).square().mean().backward()
            optimizer.step()
            decisions.append(tuner.step())
    finally:
        tuning.measure_collectives = original
    made = [d for d in decisions if d is not None]
    assert len(made) == 1
    digests: list[Any] = [None] * world
    dist.all_gather_object(digests, (workers.digest(ddp), str(made[0].chosen), made[0].reason))
    return made[0], handle.stats().spec, handle.stats().ratio_per_step, len(set(digests)) == 1


def refused(rank: int, world: int) -> str:
    ddp = DDP(Mixed())
    handle = gradcomp.register(ddp, "none")
    try:
        Autotune(handle, steps=1)
    except gradcomp.ConfigError as error:
        return str(error)
    return ""


CASES = {("bytes", spec): (stats_of, (spec,)) for spec in SPECS}
TWO = workers.Battery(
    2,
    {
        **CASES, "probe": (probed, ()), "slow": (tuned, (0.01, True, True)), "fast": (tuned, (10000.0, True, True)),
        "risky": (tuned, (0.001, False, True)), "refused": (refused, ()),
    },
    timeout=110,
)  # fmt: skip
THREE = workers.Battery(3, CASES | {("fsdp", spec): (stats_of_fsdp, (spec,)) for spec in SCATTERED}, timeout=110)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world", [2, 3])
def test_planned_bytes_are_what_stats_count(world: int, spec: str) -> None:
    model = Model.of(Mixed())
    job = Job(model=model, gpus=world, network=assumed_network(1.0), precision="fp32", bucket_mb=CAP_MB, device="cpu",
              backend="gloo")  # fmt: skip
    row = predict(job, "ddp", spec)
    for rank, (sent, residual) in enumerate((TWO if world == 2 else THREE)["bytes", spec]):
        # integer division in each collective's count
        assert sent == pytest.approx(row.bytes_per_rank, abs=2 * 12), rank
        if rank == 0:
            assert residual == row.memory.get("gradcomp residuals", 0)


@pytest.mark.parametrize("spec", SCATTERED)
def test_planned_bytes_of_a_compressed_reduce_scatter(spec: str) -> None:
    layers = nn.Sequential(*(nn.Linear(a, b) for a, b in ((96, 200), (200, 144), (144, 331))))
    # as gradcomp counts; what gloo makes of a plain reduce-scatter is another matter (above)
    job = Job(
        model=Model.of(layers), gpus=3, network=assumed_network(1.0), precision="fp32", device="cpu", backend="nccl"
    )
    row = predict(job, "fsdp2", spec)
    weights = 2 * 2 / 3 * 4 * job.model.numel
    for rank, (sent, residual) in enumerate(THREE["fsdp", spec]):
        assert sent == pytest.approx(row.bytes_per_rank - weights, abs=8), rank
        if rank == 0:
            assert residual == row.memory.get("gradcomp residuals", 0)


def test_a_bucket_of_any_rank_is_the_same() -> None:
    parameters = Model.of(Mixed()).parameters(torch.float32)
    for spec in SPECS:
        assert dry_run(parameters, spec, 3) == dry_run(parameters, spec, 3)


def test_probe_measures() -> None:
    (found, said), (other, _) = TWO["probe"]
    assert found == other  # all ranks share what they measured
    assert set(found.collectives) == {"AllReduce", "AllToAll", "AllGather", "ReduceScatter"}
    for curve in found.collectives.values():
        assert [x for x, _ in curve.points] == sorted(x for x, _ in curve.points)
        assert len(curve.points) >= 2
        assert curve.per_byte > 0
    assert len(found.codecs["int8"].segments) == 3
    assert len(found.codecs["none"].segments) == 2
    assert found.compute is not None
    assert min(found.compute.values()) > 0
    assert any("ns per element" in line for line in said)


def test_autotune_compresses_on_a_slow_link() -> None:
    for decision, spec, ratio, agree in TWO["slow"]:
        assert agree
        assert spec == "int8" == decision.chosen.spec
        assert ratio > 3
        assert "times faster than uncompressed" in decision.reason


def test_autotune_leaves_alone_what_is_fast() -> None:
    for decision, spec, ratio, agree in TWO["fast"]:
        assert agree
        assert spec == "none" == decision.chosen.spec
        assert ratio == 1
        assert decision.reason.startswith("no compression")


def test_autotune_gives_groups_of_parameters_their_own() -> None:
    """At a megabit the embedding, which 1-bit and PowerSGD leave out, is worth an int8 of its own, or Top-K takes all."""
    for decision, spec, ratio, agree in TWO["risky"]:
        assert agree
        assert ratio > 6
        assert spec == decision.chosen.spec != "none"
        with_rules = [c for c in decision.candidates if c.rules]
        assert {c.spec for c in with_rules} == {"onebit", "powersgd"}
        for candidate in with_rules:
            alone = next(c for c in decision.candidates if c.spec == candidate.spec and not c.rules)
            assert candidate.step_seconds < alone.step_seconds
            assert [rule.name for rule in candidate.rules] == ["embed.weight"]


def test_autotune_refuses() -> None:
    assert all("steps=1" in text for text in TWO["refused"])
