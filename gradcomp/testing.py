"""For tests of gradcomp and of third-party compressors: real ranks on gloo, and the contract that every compressor keeps.

:func:`launch` spawns processes over a file rendezvous on the loopback interface; a hang, a crash or an exception of a rank
is a result, not the end of the test run.
"""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradcomp.bucket import Parameter, ParameterTable, Slot, shard_slots
from gradcomp.engine import BucketExchange, Context
from gradcomp.kernels.select import get_ops
from gradcomp.memory import Memory
from gradcomp.registry import parse_spec
from gradcomp.rules import as_rules, choose
from gradcomp.virtual import VirtualGroup


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a rank: ``value`` if ``ok``, else ``error`` ("Type: message", or how the process ended)."""

    ok: bool
    value: Any = None
    error: str = ""


def _entry(rank: int, world: int, path: str, fn: Callable[..., Any], args: Any, out: Any, timeout: float) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        out.put((rank, True, fn(rank, world, *args)))
    except BaseException as error:
        if os.environ.get("GRADCOMP_TRACEBACK"):
            traceback.print_exc()
        out.put((rank, False, f"{type(error).__name__}: {error}"))
    out.close()
    out.join_thread()
    os._exit(0)  # gloo's threads sometimes abort at a normal exit, after all work is done


def launch(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 90, group_timeout: float = 30
) -> list[Outcome]:
    """Run ``fn(rank, world, *args)`` in ``world`` processes with an initialised gloo group; one outcome per rank.

    ``fn`` must be importable (defined at module level). ``group_timeout`` is the process group's, in seconds.
    """
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory(prefix="gradcomp-") as folder:
        path = os.path.join(folder, "rendezvous")
        processes = [
            context.Process(target=_entry, args=(rank, world, path, fn, args, out, group_timeout), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < world and time.monotonic() < deadline:
            try:
                rank, ok, value = out.get(timeout=0.2)
                outcomes[rank] = Outcome(True, value) if ok else Outcome(False, error=value)
            except queue.Empty:
                if all(process.exitcode is not None for process in processes) and out.empty():
                    break
        for process in processes:
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()
    for rank, process in enumerate(processes):
        outcomes.setdefault(rank, Outcome(False, error=f"no result, exit code {process.exitcode}"))
    return [outcomes[rank] for rank in range(world)]


def run(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 90, group_timeout: float = 30) -> list[Any]:
    """As :func:`launch`, but returns the values and raises ``AssertionError`` if any rank failed."""
    outcomes = launch(fn, world, *args, timeout=timeout, group_timeout=group_timeout)
    failed = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if not outcome.ok]
    if failed:
        raise AssertionError("; ".join(failed))
    return [outcome.value for outcome in outcomes]


class VirtualBucket:
    """One bucket on N virtual ranks: the engine without processes, to test compressors and study world sizes.

    ``shapes``: of the parameters in the bucket, or the parameters themselves. After :meth:`step` every rank's result is
    returned. With ``scatter`` the exchange is a reduce-scatter: each rank's gradient is laid out in rows, and the result is
    put together again.
    """

    def __init__(
        self,
        spec: str,
        shapes: Sequence[tuple[int, ...] | Parameter],
        world: int,
        *,
        dtype: torch.dtype = torch.float32,
        rules: Sequence[Any] = (),
        backend: str = "auto",
        find_unused: bool = False,
        scatter: bool = False,
    ) -> None:
        self.parameters = [
            shape if isinstance(shape, Parameter) else _parameter(f"p{i}", shape, dtype, world if scatter else None)
            for i, shape in enumerate(shapes)
        ]
        self.table = ParameterTable(self.parameters, world)
        self.group = VirtualGroup(world)
        self.dtype = dtype
        self.ops = get_ops(torch.device("cpu"), backend)
        self.memories = [Memory(self.table, rank, world) for rank in range(world)]
        self.choices = choose(self.parameters, spec, as_rules(rules))
        self.steps, self.find_unused = 0, find_unused
        self.build(list(range(len(shapes))))

    def build(self, order: Sequence[int]) -> None:
        """Lay the bucket out anew, with these parameters in this order."""
        self.slots, offset = [], 0
        for i in order:
            p = self.parameters[i]
            stride = torch.empty(p.shape, device="meta").stride()
            self.slots.append(Slot(p.name, offset, p.numel, p.shape, tuple(stride)))
            offset += p.numel
        self.numel = offset
        self.row: int | None = None
        placed, buffer = self.slots, torch.zeros(self.numel, dtype=self.dtype)
        if self.table.scatters:
            placed, self.row = shard_slots([self.parameters[i] for i in order], self.group.world)
            buffer = torch.zeros(self.row * self.group.world, dtype=self.dtype)
            # where each element of the rows stands in the flat gradient
            start = {slot.name: slot.offset for slot in self.slots}
            self._rows, self._flat = [], []
            for piece in placed:
                assert piece.owner is not None
                begin = start[piece.parameter] + piece.owner * (self.table.whole[piece.parameter].chunk or 0)
                self._flat.append(torch.arange(begin, begin + piece.numel))
                self._rows.append(torch.arange(piece.offset, piece.offset + piece.numel))
        contexts = [
            Context(self.table, memory, rank, self.group.world, self.ops, self.find_unused)
            for rank, memory in enumerate(self.memories)
        ]
        self.exchanges = [BucketExchange(placed, buffer, self.choices, context, self.row) for context in contexts]

    def step(self, gradients: Sequence[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
        """Exchange one flat gradient per rank; commits residuals if the step was finite."""
        buffers = [gradient.clone() for gradient in gradients]
        if self.row is None:
            self.group.run([e.run(b, self.steps, scale) for e, b in zip(self.exchanges, buffers, strict=True)])
        else:
            buffers = self._step_by_rows(buffers, self.row, scale)
        for exchange, memory in zip(self.exchanges, self.memories, strict=True):
            if exchange.ok:
                memory.commit()
                exchange.settle()
            else:
                memory.discard()
        self.steps += 1
        return buffers

    def _step_by_rows(self, gradients: list[torch.Tensor], row: int, scale: float) -> list[torch.Tensor]:
        """A reduce-scatter; the mean that the ranks hold together, as the result of each of them."""
        world, flat, rows = self.group.world, torch.cat(self._flat), torch.cat(self._rows)
        inputs = [torch.zeros(world * row, dtype=self.dtype).index_copy_(0, rows, g[flat]) for g in gradients]
        shards = [torch.full((row,), 1e9, dtype=self.dtype) for _ in gradients]
        runs = zip(self.exchanges, inputs, shards, strict=True)
        self.group.run([exchange.run(buffer, self.steps, scale, shard) for exchange, buffer, shard in runs])
        mean = torch.zeros(self.numel, dtype=self.dtype).index_copy_(0, flat, torch.cat(shards)[rows])
        return [mean] * world

    def state_dicts(self) -> list[dict[str, Any]]:
        """Every rank's memory, as a checkpoint would hold it."""
        return [memory.state_dict() for memory in self.memories]

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore every rank's memory exactly and build the bucket anew."""
        for memory, state in zip(self.memories, states, strict=True):
            memory.load_state_dicts([state], exact=True)
        order = {parameter.name: i for i, parameter in enumerate(self.parameters)}
        self.build([order[slot.name] for slot in self.slots])

    def residual(self) -> torch.Tensor:
        """What error feedback holds back of the mean, fp32 [numel]: mean of worker + sum of server residuals."""
        total = torch.zeros(self.numel)
        for memory in self.memories:
            held = Memory(self.table, memory.rank, memory.world)
            held.load_state_dicts([memory.state_dict()], exact=False)  # folds the server's part into the worker's
            for slot in self.slots:
                values = held.state_dict()["worker"].get(slot.name)
                if values is not None:
                    total[slot.offset : slot.offset + slot.numel] += values / self.group.world
        return total


def _parameter(name: str, shape: tuple[int, ...], dtype: torch.dtype, owners: int | None) -> Parameter:
    numel = int(torch.Size(shape).numel())
    return Parameter(name, numel, shape, dtype, chunk=None if owners is None else -(-numel // owners))


CONTRACT_SHAPES: Sequence[tuple[int, ...]] = ((96, 80), (80,), (64, 3, 3, 3), (2000,), (1,), (96, 80), (0,), (33, 47))
"""Matrices, a convolution, vectors, one element, none at all, and sizes that no block divides."""


def check_compressor(
    spec: str, backend: str = "auto", worlds: Sequence[int] = (1, 2, 3, 5), scatter: bool = False
) -> None:
    """The contract of every compressor, on virtual ranks; raises ``AssertionError`` naming what is broken.

    With ``scatter``: the same in a reduce-scatter.

    For each world size: all ranks end with the same bits; zeros stay zeros; what was applied plus what is held back is the
    sum of the true means; inf and NaN reach every rank and change no memory; a loss scale changes nothing; saving and
    loading changes nothing; the number of bytes is the same in every step if the traits say so.
    """
    compressor, _ = parse_spec(spec)
    for world in worlds:
        where = f"{spec} on {world} ranks"
        bucket = VirtualBucket(spec, CONTRACT_SHAPES, world, backend=backend, scatter=scatter)
        generator = torch.Generator().manual_seed(world)
        common = torch.randn(bucket.numel, generator=generator)

        def gradients(
            common: torch.Tensor = common, g: torch.Generator = generator, n: int = world
        ) -> list[torch.Tensor]:
            return [common + torch.randn(common.numel(), generator=g) for _ in range(n)]

        zeros = bucket.step([torch.zeros(bucket.numel)] * world)
        assert all(torch.equal(result, torch.zeros(bucket.numel)) for result in zeros), f"{where}: zeros are not kept"

        applied, true, sent = torch.zeros(bucket.numel), torch.zeros(bucket.numel), set()
        for _ in range(4):
            ours, before = gradients(), bucket.group.bytes_sent
            results = bucket.step(ours)
            sent.add(bucket.group.bytes_sent - before)
            assert all(torch.equal(results[0], result) for result in results), f"{where}: the ranks differ"
            applied, true = applied + results[0], true + torch.stack(ours).mean(0)
        if compressor.traits.fixed_size:
            assert len(sent) == 1, f"{where}: the payload's size changes: {sent}"
        if any(exchange.feeds_back for exchange in bucket.exchanges):
            lost = (applied + bucket.residual() - true).abs().max()
            assert lost < 1e-4, f"{where}: {lost} was lost or invented"
        else:
            error = float((applied - true).norm() / true.norm())
            assert error < 2.0 ** (2 - min(compressor.traits.bits, 8)), f"{where}: relative error {error}"

        _check_nonfinite(bucket, gradients(), where)

        scaled = VirtualBucket(spec, CONTRACT_SHAPES, world, backend=backend, scatter=scatter)
        plain = VirtualBucket(spec, CONTRACT_SHAPES, world, backend=backend, scatter=scatter)
        for _ in range(2):
            ours = gradients()
            up = scaled.step([gradient * 1024 for gradient in ours], scale=1024.0)[0]
            down = plain.step(ours)[0]
        assert torch.equal(up, down * 1024), f"{where}: a loss scale changes the result"

        resumed = VirtualBucket(spec, CONTRACT_SHAPES, world, backend=backend, scatter=scatter)
        resumed.load_state_dicts(plain.state_dicts())
        resumed.steps = plain.steps
        ours = gradients()
        assert torch.equal(plain.step(ours)[0], resumed.step(ours)[0]), f"{where}: resuming changes the result"


def _check_nonfinite(bucket: VirtualBucket, gradients: list[torch.Tensor], where: str) -> None:
    before = bucket.state_dicts()
    for value in (float("inf"), float("-inf"), float("nan")):
        for slot in bucket.slots:
            if slot.numel:
                poisoned = [gradient.clone() for gradient in gradients]
                poisoned[-1][slot.offset + slot.numel - 1] = value
                results = bucket.step(poisoned)
                assert not any(bool(r.isfinite().all()) for r in results), f"{where}: {value} in {slot.name} got lost"
    for old, new in zip(before, bucket.state_dicts(), strict=True):
        assert _same(old, new), f"{where}: a non-finite step changed the memory"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return bool(one == other)
