"""``gradcomp probe``: what the planner would otherwise have to assume, measured on all ranks at once.

Every rank takes part in everything, so ranks that share cores, a network card or a switch are measured as they will run.
The slowest rank counts, since the others wait for it.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from gradcomp.bucket import Parameter, ParameterTable
from gradcomp.collectives import AllGather, AllReduce, AllToAll, Collective, Group, ReduceScatter
from gradcomp.compressors.base import require
from gradcomp.engine import BucketExchange, Context
from gradcomp.errors import ConfigError
from gradcomp.kernels.select import get_ops
from gradcomp.memory import Memory
from gradcomp.planner.payload import loop_back, slots_of, steady_requests
from gradcomp.planner.profile import Codec, Curve, Profile
from gradcomp.planner.volume import sent_bytes
from gradcomp.registry import format_spec
from gradcomp.rules import choose

_BUDGET = 1.5
"""Seconds that one size of one collective may take."""
_ELEMENTS = ((256, 256), (2560, 2560))
"""Matrices by which codecs are timed: 0.26 MB and 26 MB of fp32, a small bucket and one of DDP's default size."""

_REST = 0.01
"""Seconds without traffic before a collective is timed."""
_BUCKET = 4 << 20
"""Bytes from which on an all-reduce counts as a bucket: DDP has several of them under way, so larger ones are probed in two."""
_PIECE, _PIECES = 1 << 18, 16
"""Compressors send a large bucket in several messages that are under way at once, and so does the probe: at most so many,
of at least so many bytes for each peer. (gloo sends both ways on one connection; of one large message each way, one direction
may go first and the other after it, at half the speed. At 1 Gb/s: 59 to 119 MB/s in one message, 107 to 120 in eight.)"""

Say = Callable[[str], None]


def _requests(kind: str, sent: float, world: int, device: torch.device) -> list[Collective]:
    """Collectives in which every rank sends about ``sent`` bytes in all."""

    def zeros(count: float, dtype: torch.dtype) -> Tensor:
        return torch.zeros(max(1, int(count)) * (1 if dtype == torch.uint8 else world), dtype=dtype, device=device)

    share = (world - 1) / world
    if kind == "AllReduce":  # as of two of DDP's buckets
        pieces = 2 if sent >= 2 * _BUCKET else 1
        return [AllReduce(zeros(sent / pieces / (2 * share) / 4 / world, torch.float32)) for _ in range(pieces)]
    if kind == "ReduceScatter":
        send = zeros(sent / share / 4 / world, torch.float32)
        return [ReduceScatter(send, zeros(send.numel() // world, torch.uint8).float())]
    message = max(1, int(sent / (world - 1)))
    pieces = min(_PIECES, max(1, message // _PIECE))
    row = message // pieces
    if kind == "AllToAll":
        return [
            AllToAll(zeros(row * world, torch.uint8), zeros(row * world, torch.uint8), ahead=True)
            for _ in range(pieces)
        ]
    return [AllGather(zeros(row, torch.uint8), zeros(row * world, torch.uint8), ahead=True) for _ in range(pieces)]


def measure_collectives(
    group: Group,
    device: torch.device,
    largest: float,
    say: Say,
    kinds: Sequence[str] = ("AllReduce", "AllToAll", "AllGather"),
) -> dict[str, Curve]:
    """Seconds of each kind of collective against bytes sent, at sizes from 4 kB to ``largest``, each four times the last.

    The link rests before each one, as it does in training while gradients are computed: what switches and token buckets let
    through at once after a rest counts.
    """
    curves = {}
    for kind in kinds:
        points: list[tuple[float, float]] = []
        size, issue = 4096.0, 0.0
        while size <= largest:
            requests = _requests(kind, size, group.world, device)
            once = max(_timed(group, requests, device, 2)[0])
            times, starts = _timed(group, requests, device, max(3, min(15, int(_BUDGET / 2 / once))))
            if not points:
                issue = statistics.median(starts)
            nbytes = sum(request.wire_bytes(group.world) for request in requests)
            sent = sent_bytes(kind, float(nbytes), group.backend)
            points.append((sent, statistics.median(times)))
            if once * 4 > _BUDGET and len(points) >= 3:
                break
            size *= 4
        curves[kind] = Curve.fit(points, issue)
        say(
            f"{kind}: {1e3 * curves[kind].fixed:.3g} ms + bytes / {1e-6 / curves[kind].per_byte:.4g} MB/s, "
            f"largest deviation {100 * curves[kind].residual:.0f} %"
        )
    return curves


def _timed(
    group: Group, requests: Sequence[Collective], device: torch.device, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds from a rest until all of ``requests`` have ended, and until they were issued; on the slowest rank."""
    together = AllReduce(torch.zeros(1, device=device))
    times = []
    for _ in range(repeats):
        time.sleep(_REST)
        group.run(together)
        _settle(device)
        begun = time.perf_counter()
        under_way = [group.start(request) for request in requests]
        issued = time.perf_counter() - begun
        for pending in under_way:
            pending.wait()
        _settle(device)
        times.append((time.perf_counter() - begun, issued))
    slowest = [
        [max(rank[i] for rank in ranks) for i in range(2)]
        for ranks in zip(*group.gather_object(times, "probe"), strict=True)
    ]
    return [whole for whole, _ in slowest], [issued for _, issued in slowest]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_codec(
    group: Group, spec: str, device: torch.device, dtype: torch.dtype = torch.float32, steps: int = 7
) -> Codec:
    """Host or device time of one compressor before, between and after its collectives, from two sizes of bucket.

    The exchange is this rank's own, in a world of the group's size; collectives are completed from its own data. Where ranks
    share cores, each takes as long as until the last one is through.
    """
    ops = get_ops(device, "auto")
    together = AllReduce(torch.zeros(1, device=device))
    samples: list[tuple[int, list[float]]] = []
    turns = 1.0
    for shape in _ELEMENTS:
        parameter = Parameter("probe", shape[0] * shape[1], shape, dtype)
        memory = Memory(ParameterTable([parameter]), group.rank, group.world)
        buffer = torch.randn(parameter.numel, dtype=dtype, device=device)
        exchange = BucketExchange(
            slots_of([parameter]), buffer, choose([parameter], spec, ()),
            Context(memory.table, memory, group.rank, group.world, ops),
        )  # fmt: skip
        gradient = buffer.clone()
        times: list[list[float]] = []
        spans: list[tuple[float, float]] = []  # until all ranks are through, and of waiting for each other alone
        for _ in range(steps):
            buffer.copy_(gradient)
            group.run(together)
            begun = time.perf_counter()
            times.append(_segments(exchange, buffer, group.world, device))
            group.run(together)
            done = time.perf_counter()
            group.run(together)
            spans.append((done - begun, time.perf_counter() - done))
            memory.commit()
        samples.append((parameter.numel, [statistics.median(column) for column in zip(*times[2:], strict=True)]))
        # one rank's own time does not show that others, or it before it began, waited for a core
        everyone = group.gather_object([(sum(own), *span) for own, span in zip(times, spans, strict=True)][2:], "probe")
        own, span, idle = (
            statistics.median(max(rank[i] for rank in ranks) for ranks in zip(*everyone, strict=True)) for i in range(3)
        )
        turns = max(1.0, (span - idle) / own)
    small, large = samples
    mine = [(turns * (t1 - t0) / (large[0] - small[0]), t0) for t0, t1 in zip(small[1], large[1], strict=True)]
    everyone = group.gather_object([(max(0.0, each), max(0.0, t0 - each * small[0])) for each, t0 in mine], "probe")
    segments = tuple(
        (max(rank[i][1] for rank in everyone), max(rank[i][0] for rank in everyone)) for i in range(len(mine))
    )
    return Codec(segments, f"measured, {group.world} ranks, kernels {ops.name}")


def _segments(exchange: BucketExchange, buffer: Tensor, world: int, device: torch.device) -> list[float]:
    seconds, before = [0.0], None
    begun = time.perf_counter()
    for request in steady_requests(exchange, buffer, world):
        _settle(device)
        spent = time.perf_counter() - begun
        if before is not None and not (request.ahead and type(request) is type(before)):
            seconds.append(0.0)
        seconds[-1] += spent  # pieces of one phase count together
        before = request
        loop_back(request, world)
        _settle(device)
        begun = time.perf_counter()
    _settle(device)
    return [*seconds, time.perf_counter() - begun]


def measure_compute(
    group: Group, module: nn.Module, loss_of: Callable[[nn.Module], Tensor], optimizer: torch.optim.Optimizer | None = None,
    steps: int = 12, bucket_cap_mb: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """Seconds of forward, backward and optimizer step on all ranks at once, in DDP but without any exchange."""
    device = next(module.parameters()).device
    ddp = DistributedDataParallel(module, process_group=group.process_group, bucket_cap_mb=bucket_cap_mb)
    ddp.register_comm_hook(None, noop_hook)
    rows = []
    for _ in range(steps):
        for p in module.parameters():
            p.grad = None
        group.gather_object(None, "probe")
        marks = [time.perf_counter()]
        loss = loss_of(ddp)
        _settle(device)
        marks.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        _settle(device)
        marks.append(time.perf_counter())
        if optimizer is not None:
            optimizer.step()
        _settle(device)
        marks.append(time.perf_counter())
        rows.append([b - a for a, b in itertools.pairwise(marks)])
    everyone = group.gather_object(rows[3:], "probe")
    # every step takes as long as on its slowest rank, which is not always the same one
    step = statistics.median(max(sum(row) for row in ranks) for ranks in zip(*everyone, strict=True))
    parts = [statistics.median(column) for column in zip(*itertools.chain(*everyone), strict=True)]
    return {
        name: part * step / sum(parts) for name, part in zip(("forward", "backward", "optimizer"), parts, strict=True)
    }


def measure(
    group: Group, gigabits: float, specs: Sequence[str], largest: float, device: torch.device, say: Say,
    compute: Callable[[], Mapping[str, float]] | None = None,
) -> Profile:  # fmt: skip
    """Everything, as a profile. Collective."""
    kinds = ("AllReduce", "AllToAll", "AllGather", "ReduceScatter")
    collectives = measure_collectives(group, device, largest, say, kinds)
    codecs = {}
    for spec in specs:
        codecs[format_spec(spec)] = codec = measure_codec(group, spec, device)
        say(f"{spec}: {1e9 * sum(each for _, each in codec.segments):.2f} ns per element, {codec.source}")
    measured = None if compute is None else dict(compute())
    if measured is not None:
        say("your step: " + ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in measured.items()))
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    return Profile(
        ranks=group.world, backend=group.backend, device=device.type, gigabits=gigabits, collectives=collectives,
        codecs=codecs, compute=measured, machine=machine,
    )  # fmt: skip


def main(
    gigabits: float, out: Path, specs: Sequence[str], largest: float, step: Path | None, device: str, console: Console
) -> None:
    """The command: initialises the process group from torchrun's variables, measures, and writes ``out`` on rank 0.

    Raises:
        ConfigError: not under torchrun, on one rank, or a bad option.
    """
    for name in ("RANK", "WORLD_SIZE"):
        if name not in os.environ:
            raise ConfigError(
                "gradcomp probe needs several ranks: run it under torchrun, e.g. torchrun --nproc-per-node 2 -m gradcomp probe "
                "--link 10Gbps"
            )
    require(int(os.environ["WORLD_SIZE"]) > 1, "WORLD_SIZE", os.environ["WORLD_SIZE"], "at least 2 ranks")
    require(device in ("auto", "cpu", "cuda"), "device", device, "auto, cpu or cuda")
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    require(not on_gpu or torch.cuda.is_available(), "device", device, "cpu: this torch sees no CUDA device")
    chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(chosen)
    make = _load(step) if step is not None else None
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    world = dist.group.WORLD
    assert world is not None
    group = Group(world)

    def say(line: str) -> None:
        if group.rank == 0:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def compute() -> Mapping[str, float]:
        assert make is not None
        module, loss_of, *rest = make()
        return measure_compute(group, module.to(chosen), loss_of, rest[0] if rest else None)

    found = measure(group, gigabits, specs, largest, chosen, say, None if make is None else compute)
    if group.rank == 0:
        try:
            found.save(out)
        except OSError as error:
            raise ConfigError(f"out={str(out)!r}: allowed is a file that can be written: {error}") from error
        console.print(_table(found))
        console.print(f"Wrote {out}. Use it: gradcomp plan ... --profile {out}", highlight=False, markup=False)
    dist.destroy_process_group()


def _load(path: Path) -> Callable[[], Any]:
    """The function ``make`` of the user's file."""
    spec = importlib.util.spec_from_file_location("gradcomp_probe_step", path)
    try:
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        make: Callable[[], Any] = module.make
        return make
    except (AssertionError, OSError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"step={str(path)!r}: allowed is a Python file with a function make() that returns (module, function of the module "
            f"that returns the loss[, optimizer]): {error}"
        ) from error


def _table(found: Profile) -> Table:
    table = Table(title=f"{found.ranks} ranks, {found.backend}, {found.device}", header_style="bold")
    for heading in ("collective", "latency ms", "MB/s sent", "of the link", "deviation"):
        table.add_column(heading, justify="left" if heading == "collective" else "right")
    for kind, curve in found.collectives.items():
        rate = 1 / curve.per_byte
        table.add_row(
            kind, f"{1e3 * curve.fixed:.3g}", f"{rate / 1e6:.4g}", f"{100 * 8 * rate / (found.gigabits * 1e9):.0f} %",
            f"{100 * curve.residual:.0f} %",
        )  # fmt: skip
    return table
