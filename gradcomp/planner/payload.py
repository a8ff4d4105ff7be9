"""What a bucket costs, asked of the code that sends it.

:func:`dry_run` lets the library's own exchange run for one rank of N, with kernels that do nothing, and writes down the
collectives it asks for. Headers, block padding, riders and bypassed parameters are in, because they are in the exchange;
there is no second set of numbers. Buffers are allocated but not touched, so that they cost address space, not memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from gradcomp import wire
from gradcomp.bucket import Parameter, ParameterTable, Slot, shard_slots
from gradcomp.collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter, Wait
from gradcomp.engine import BucketExchange, Context
from gradcomp.memory import Memory
from gradcomp.planner.volume import sent_bytes
from gradcomp.registry import format_spec, parse_spec
from gradcomp.rules import Choice, choose

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""DDP's defaults (``bucket_cap_mb=25``; the first bucket is 1 MB)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A collective of one bucket: its kind, the bytes that each rank sends, whether nothing is issued after it, whether it
    is one of several pieces that are under way at the same time, and which part of all of those it is."""

    kind: str
    nbytes: float
    final: bool
    ahead: bool = False
    part: float = 1.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's exchange: elements, of them compressed, requests in order; on this rank bytes of residuals, of buffers, and
    of index tables."""

    numel: float
    compressed: float
    requests: tuple[Request, ...]
    residual: float = 0.0
    scratch: float = 0.0
    tables: float = 0.0

    @property
    def nbytes(self) -> float:
        """Bytes that each rank sends."""
        return sum(request.nbytes for request in self.requests)

    def on(self, backend: str) -> Bucket:
        """The same with the bytes that ``backend`` really sends."""
        requests = tuple(replace(r, nbytes=sent_bytes(r.kind, r.nbytes, backend)) for r in self.requests)
        return replace(self, requests=requests)

    @property
    def phases(self) -> list[list[Request]]:
        """The requests, those that are under way at the same time together, with their ``part``."""
        phases: list[list[Request]] = []
        for request in self.requests:
            if phases and request.ahead and request.kind == phases[-1][0].kind:
                phases[-1].append(request)
            else:
                phases.append([request])
        for phase in phases:
            total = sum(request.nbytes for request in phase)
            if len(phase) > 1 and total:
                phase[:] = [replace(request, part=request.nbytes / total) for request in phase]
        return phases

    def scaled(self, factor: float) -> Bucket:
        """The same for ``factor`` times the elements."""
        if factor == 1.0:
            return self
        requests = tuple(replace(r, nbytes=factor * r.nbytes) for r in self.requests)
        sizes = (factor * value for value in (self.residual, self.scratch, self.tables))
        return Bucket(factor * self.numel, factor * self.compressed, requests, *sizes)


class _NoOps:
    """Kernels that do nothing."""

    name = "none"

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class _Dry(TorchFunctionMode):
    """Large buffers stay untouched: they are allocated lazily, and what would fill or read them whole is left out.

    ``buffers``: bytes that ``torch.zeros`` has allocated; ``tables``: that copies to the device have.
    """

    _LARGE = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.buffers = self.tables = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        large = bool(args) and isinstance(args[0], torch.Tensor) and args[0].numel() > self._LARGE
        if large and func in (torch.Tensor.copy_, torch.Tensor.zero_, torch.Tensor.fill_):
            return args[0]
        if large and func is torch.isfinite:
            return torch.ones(1, dtype=torch.bool)
        if large and func is torch.Tensor.sum and len(args) == 1:
            return torch.zeros(())
        result = untouched(*args, kwargs.get("dtype")) if func is torch.zeros else func(*args, **kwargs)
        if func is torch.zeros:
            self.buffers += result.nbytes
        elif func is torch.Tensor.to:
            self.tables += result.nbytes
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


def untouched(*shape: Any) -> torch.Tensor:
    """Zeros in pages that the system provides when they are first used (torch writes to them at once). Last: the dtype."""
    *sizes, dtype = shape
    size = torch.Size(sizes[0] if isinstance(sizes[0], tuple) else sizes)
    dtype = dtype or torch.float32
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    return torch.from_numpy(np.zeros(size.numel() * dtype.itemsize, np.uint8)).view(dtype).view(size)


def loop_back(request: Collective, world: int, whole: bool = True) -> None:
    """Complete a collective as if all ranks had sent what this one did; with ``whole`` false only its headers."""
    part = slice(None) if whole else slice(0, wire.BODY)
    if isinstance(request, AllReduce):
        values = request.tensor.view(-1)
        (values if whole else values[-wire.SUM_SLOTS :]).mul_(world)
    elif isinstance(request, AllGather):
        request.recv.view(world, -1)[:, part] = request.send[part]
    elif isinstance(request, AllToAll):
        request.recv.view(world, -1)[:, part] = request.send.view(world, -1)[0, part]
    elif isinstance(request, ReduceScatter):
        if whole:
            torch.mul(request.send.view(world, -1)[0], world, out=request.recv)
    else:
        raise AssertionError(f"unknown collective {type(request).__name__}")


def steady_requests(
    exchange: BucketExchange, buffer: torch.Tensor, world: int, out: torch.Tensor | None = None
) -> Iterator[Collective]:
    """The collectives of one step without the handshake of the first one."""
    for request in exchange.run(buffer, 0, 1.0, out):
        if isinstance(request, Wait):  # complete, as everything here
            continue
        handshake = isinstance(request, AllGather) and request.send.numel() == wire.HEADER_BYTES
        if handshake:
            loop_back(request, world)
        else:
            yield request


def slots_of(parameters: Sequence[Parameter]) -> list[Slot]:
    """The parameters one after another in a flat bucket."""
    slots, offset = [], 0
    for p in parameters:
        stride = tuple(math.prod(p.shape[i + 1 :]) for i in range(len(p.shape)))
        slots.append(Slot(p.name, offset, p.numel, p.shape, stride))
        offset += p.numel
    return slots


def dry_run(parameters: Sequence[Parameter], spec: str, world: int, table: ParameterTable | None = None) -> Bucket:
    """What rank 0 of ``world`` sends for one bucket of ``parameters`` in a step, and what it keeps for it.

    Args:
        parameters: in the bucket, in its order.
        spec: of the compressor.
        world: ranks.
        table: all parameters of the model in declaration order; those of the bucket if left out.

    Raises:
        ConfigError: a bad spec.
    """
    _compressor, config = parse_spec(spec)
    table = table or ParameterTable(parameters)
    block = getattr(config, "block", 256)
    # A block's owner is its number modulo N; sizes depend on how the blocks of the parameters lie to one another only.
    starts = [table.first_block(p.name, block) for p in parameters]
    key = tuple(
        ((p.shape, p.dtype, p.embedding), (start - starts[0]) % world)
        for p, start in zip(parameters, starts, strict=True)
    )
    return _dry_run(key, block, format_spec(spec), world, table.numel)


@lru_cache(maxsize=4096)
def _dry_run(key: tuple[Any, ...], block: int, spec: str, world: int, model_numel: int) -> Bucket:
    described: list[Parameter] = []
    padding: list[Parameter] = []  # stands for the parameters declared in between
    number = 0
    for i, ((shape, dtype, embedding), start) in enumerate(key):
        gap = (start - number) % world
        padding.append(Parameter(f"before {i}", gap * block, (gap * block,), dtype))
        described.append(Parameter(f"p{i}", math.prod(shape), shape, dtype, embedding))
        number += gap - -described[-1].numel // block
    listed = [p for pair in zip(padding, described, strict=True) for p in pair]
    rest = max(0, model_numel - sum(p.numel for p in listed))
    table = ParameterTable([*listed, Parameter("rest", rest, (rest,), torch.float32)])
    numel = sum(p.numel for p in described)
    choices = choose(described, spec, ())
    compressed = sum(p.numel for p in described if choices[p.name].spec != "none")
    if world == 1:
        return Bucket(numel, compressed, ())
    if not compressed:
        return plain(described, world)
    return run_dry(described, choices, table, world)


def plain(parameters: Sequence[Parameter], world: int) -> Bucket:
    """The uncompressed all-reduce of a bucket, in the gradients' type."""
    numel = sum(p.numel for p in parameters)
    width = max(p.dtype.itemsize for p in parameters)
    request = AllReduce(torch.empty(numel, dtype=_of_width(width), device="meta"), final=True)
    return Bucket(numel, 0, (Request("AllReduce", request.wire_bytes(world), True),))


def run_dry(
    parameters: Sequence[Parameter], choices: Mapping[str, Choice], table: ParameterTable, world: int
) -> Bucket:
    """As :func:`dry_run`, for any choice of compressors, at least one of which is not ``none``."""
    numel = sum(p.numel for p in parameters)
    compressed = sum(p.numel for p in parameters if choices[p.name].spec != "none")
    memory = Memory(table, 0, world)
    ops: Any = _NoOps()
    # fp32 whatever the gradients' type: payloads are encoded from fp32, and the copy of the bucket would be touched
    buffer = untouched(numel, torch.float32)
    with _Dry() as dry:
        context = Context(table, memory, 0, world, ops)
        exchange = BucketExchange(slots_of(parameters), buffer, choices, context)
        scratch, tables = dry.buffers - memory.nbytes, dry.tables
        requests = _record(exchange, buffer, world)
    copy = 0 if all(p.dtype == torch.float32 for p in parameters) else 4 * numel
    return Bucket(numel, compressed, requests, memory.nbytes, scratch + copy, tables)


def _of_width(width: int) -> torch.dtype:
    return {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[width]


def ddp_buckets(
    parameters: Sequence[Parameter], first: int = FIRST_BUCKET_BYTES, cap: int = BUCKET_BYTES
) -> list[list[Parameter]]:
    """The buckets that DDP makes after its first step, in the order of backward (reverse declaration), by DDP's own function."""
    backward = list(reversed(parameters))
    tensors = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in backward]
    assignment: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    indices, _ = assignment(tensors, [first, cap], [False] * len(tensors))
    return [[backward[i] for i in sorted(bucket)] for bucket in sorted(indices, key=min)]


def deepspeed_buckets(parameters: Sequence[Parameter], elements: float) -> list[list[Parameter]]:
    """ZeRO's buckets: filled in the order of backward until one more parameter would exceed ``reduce_bucket_size``."""
    buckets: list[list[Parameter]] = [[]]
    held = 0
    for parameter in reversed(parameters):
        if buckets[-1] and held + parameter.numel > elements:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.numel
    return buckets


def scatter_run(parameters: Sequence[Parameter], spec: str, world: int, trainer: str) -> Bucket:
    """As :func:`dry_run` for a reduce-scatter of the gradients of one unit (ZeRO-3, FSDP2).

    Each rank's piece of a parameter: FSDP2 cuts the first dimension, DeepSpeed the flattened parameter.

    Raises:
        UnsupportedError: the compressor does not fit a reduce-scatter.
    """
    compressor, config = parse_spec(spec)
    compressor.check_scatter(config)
    key = tuple((p.shape, p.dtype, p.embedding) for p in parameters)
    return _scatter_run(key, format_spec(spec), world, trainer == "fsdp2")


@lru_cache(maxsize=1024)
def _scatter_run(key: tuple[Any, ...], spec: str, world: int, by_rows: bool) -> Bucket:
    described = []
    for i, (shape, dtype, embedding) in enumerate(key):
        numel = math.prod(shape)
        chunk = -(-shape[0] // world) * (numel // shape[0]) if by_rows else -(-numel // world)
        described.append(Parameter(f"p{i}", numel, shape, dtype, embedding, chunk))
    numel = sum(p.numel for p in described)
    slots, row = shard_slots(described, world)
    choices = choose(described, spec, ())
    compressed = sum(p.numel for p in described if choices[p.name].spec != "none")
    if world == 1:
        return Bucket(numel, compressed, ())
    width = max(p.dtype.itemsize for p in described)
    if not compressed:
        flat = torch.empty(world * row, dtype=_of_width(width), device="meta")
        request = ReduceScatter(flat, flat[:row], final=True)
        return Bucket(numel, 0, (Request("ReduceScatter", request.wire_bytes(world), True),))
    memory = Memory(ParameterTable(described, world), 0, world)
    ops: Any = _NoOps()
    buffer, out = untouched(world * row, torch.float32), untouched(row, torch.float32)
    with _Dry() as dry:
        exchange = BucketExchange(slots, buffer, choices, Context(memory.table, memory, 0, world, ops), row)
        scratch, tables = dry.buffers - memory.nbytes, dry.tables
        requests = _record(exchange, buffer, world, out)
    copy = 0 if width == 4 else 4 * (numel + row)
    return Bucket(numel, compressed, requests, memory.nbytes, scratch + copy, tables)


def _record(
    exchange: BucketExchange, buffer: torch.Tensor, world: int, out: torch.Tensor | None = None
) -> tuple[Request, ...]:
    """The collectives of one step, up to the final one."""
    requests = []
    for request in steady_requests(exchange, buffer, world, out):
        requests.append(Request(type(request).__name__, request.wire_bytes(world), request.final, request.ahead))
        if request.final:
            break
        loop_back(request, world, whole=False)
    return tuple(requests)
