"""What one rank of peers.py does: the same gradients, in turns, through each of several libraries' exchanges.

It runs in the peers' own environments as well, so it needs torch and numpy alone, and imports a library only when it is
asked for. A peer is a function from one flat fp32 gradient (and its per-parameter views) to the flat mean over the ranks.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Peer = Callable[[Tensor, list[Tensor]], Tensor]
SUM_OF = 6
"""Steps over whose sum errors are compared: error feedback sends later what it held back."""
SKIP = 2
"""Steps before those: torch's PowerSGD hook sends two uncompressed; kernels are compiled."""


# ---------------------------------------------------------------- gradients
def resnet18() -> list[tuple[int, ...]]:
    """The 62 parameters of ResNet-18 for CIFAR-10: 11.17 million elements."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


class Gradients:
    """Per step and rank: a signal of rank 4, the same for all, and noise of half its size, independent for each."""

    def __init__(self, shapes: list[tuple[int, ...]], ranks: int, seed: int) -> None:
        self.shapes, self.ranks, self.seed = shapes, ranks, seed
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for shape in shapes:
            rows, numel = shape[0], math.prod(shape)
            r = min(4, rows, numel // rows)
            product = torch.randn(rows, r, generator=generator) @ torch.randn(r, numel // rows, generator=generator)
            parts.append(product.flatten() / math.sqrt(r))
        self.signal = torch.cat(parts)

    def __call__(self, step: int) -> list[Tensor]:
        """Every rank's flat gradient."""
        found = []
        for rank in range(self.ranks):
            generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + 1009 * step + rank)
            found.append(torch.randn(self.signal.numel(), generator=generator).mul_(0.5).add_(self.signal))
        return found

    def views(self, flat: Tensor) -> list[Tensor]:
        """``flat`` as parameters."""
        numels = [math.prod(shape) for shape in self.shapes]
        return [part.view(shape) for part, shape in zip(flat.split(numels), self.shapes, strict=True)]


# ---------------------------------------------------------------- peers
def all_reduce(flat: Tensor, views: list[Tensor]) -> Tensor:
    dist.all_reduce(flat)
    return flat.div_(dist.get_world_size())


class Bucket:
    """What torch's hooks ask of a ``GradBucket``: the whole model as one."""

    def __init__(self, flat: Tensor, views: list[Tensor]) -> None:
        self.flat, self.views = flat, views

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.views

    parameters = gradients


def torch_fp16(shapes: list[tuple[int, ...]]) -> Peer:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    group: Any = dist.group.WORLD
    return lambda flat, views: fp16_compress_hook(group, Bucket(flat, views)).wait()  # type: ignore[arg-type]


def torch_powersgd(shapes: list[tuple[int, ...]], rank: int) -> Peer:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=SKIP)
    return lambda flat, views: powerSGD_hook(state, Bucket(flat, views)).wait()  # type: ignore[arg-type]


def ours(shapes: list[tuple[int, ...]], spec: str) -> Peer:
    from gradcomp.bucket import Parameter, Slot
    from gradcomp.registration import Handle

    parameters = [Parameter(f"p{i}", math.prod(s), s, torch.float32) for i, s in enumerate(shapes)]
    group: Any = dist.group.WORLD
    handle = Handle(group, parameters, torch.device("cpu"), spec)

    def slots() -> list[Slot]:
        found, offset = [], 0
        for p in parameters:
            stride = torch.empty(p.shape, device="meta").stride()
            found.append(Slot(p.name, offset, p.numel, p.shape, tuple(stride)))
            offset += p.numel
        return found

    def exchange(flat: Tensor, views: list[Tensor]) -> Tensor:
        with torch.no_grad():
            handle.submit("all", slots, flat, lambda: None, True)
        return flat

    return exchange


class Packer:
    """Stands in for DeepSpeed's packer, which exists for XPU only: a bit is 1 where the value is positive or zero."""

    weights = 2 ** torch.arange(8, dtype=torch.uint8)

    def load(self) -> Packer:
        return self

    def packbits(self, values: Tensor, numel: int, rank: int) -> Tensor:
        return (values.ge(0).view(-1, 8) * self.weights).sum(1, dtype=torch.uint8)

    def unpackbits(self, packed: Tensor, numel: int, rank: int) -> Tensor:
        return packed.view(-1, 1).bitwise_and(self.weights).ne(0).flatten().float().mul_(2).sub_(1)


def deepspeed_onebit(shapes: list[tuple[int, ...]]) -> Peer:
    """``CompressedBackend.compressed_allreduce`` of DeepSpeed up to 0.19.6, which its 1-bit optimizers call."""
    import deepspeed

    compressed = importlib.import_module("deepspeed.runtime.comm.compressed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for one machine only, and compiled for a minute
    deepspeed.init_distributed("gloo")
    world, numel = dist.get_world_size(), sum(map(math.prod, shapes))
    padded = -(-numel // (8 * world**2)) * 8 * world**2

    class Comm:
        """``deepspeed.comm``, with scales of no dimension as vectors: gloo gathers into tensors of the same shape only."""

        def __getattr__(self, name: str) -> Any:
            return getattr(deepspeed.comm, name)

        def all_gather(self, outputs: list[Tensor], value: Tensor, group: Any = None) -> None:
            deepspeed.comm.all_gather([output.view(-1) for output in outputs], value.view(-1), group=group)

    compressed.PackbitsBuilder, compressed.dist = Packer, Comm()  # type: ignore[attr-defined]
    backend = compressed.CompressedBackend()
    worker, server = torch.zeros(padded), torch.zeros(padded // world)

    def exchange(flat: Tensor, views: list[Tensor]) -> Tensor:
        result: Tensor = backend.compressed_allreduce(flat, worker, server, 0)
        return result

    return exchange


def hivemind_averager(shapes: list[tuple[int, ...]], kind: str) -> Peer:
    """The averagers of hivemind, without matchmaking, which is done before the gradients are there."""
    import hivemind
    from hivemind import compression
    from hivemind.optim.grad_averager import GradientAverager
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

    rank, world, addresses = dist.get_rank(), dist.get_world_size(), [None]
    here = f"/ip4/10.77.0.{rank + 1}/tcp/0"
    if rank == 0:
        dht = hivemind.DHT(host_maddrs=[here], start=True)
        addresses = [[str(address) for address in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(addresses)
    if rank:
        dht = hivemind.DHT(host_maddrs=[here], initial_peers=addresses[0], start=True)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    options = {
        "dht": dht, "prefix": kind.replace(" ", "_"), "target_group_size": world, "min_group_size": world,
        "min_matchmaking_time": 1.0, "allreduce_timeout": 60.0, "reuse_grad_buffers": True, "start": True,
    }  # fmt: skip
    if kind.startswith("powersgd"):
        averager = PowerSGDGradientAverager(parameters, int(kind.split()[1]), **options)
    else:
        codec = {"fp16": compression.Float16Compression, "8-bit": compression.Uniform8BitQuantization}
        averager = GradientAverager(parameters, compression=codec[kind](), **options)

    def exchange(flat: Tensor, views: list[Tensor]) -> Tensor:
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad.copy_(view)  # type: ignore[union-attr]
        averager.accumulate_grads_(batch_size=1)
        if averager.step(control=exchange.control, reset_accumulators=False, timeout=120) is None:  # type: ignore[attr-defined]
            raise RuntimeError("hivemind: averaging failed")
        with averager.use_averaged_gradients() as averaged:
            torch.cat([tensor.flatten() for tensor in averaged], out=flat)
        averager.reset_accumulated_grads_()
        return flat

    def prepare() -> None:
        exchange.control = averager.schedule_step(timeout=120)  # type: ignore[attr-defined]
        deadline = time.monotonic() + 60
        while exchange.control.stage.name != "AWAITING_TRIGGER" and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.05)

    exchange.prepare = prepare  # type: ignore[attr-defined]
    return exchange


def checkout(path: str) -> None:
    """Import from a local checkout of a peer that is in no package index (or only an empty package)."""
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{path} is no folder: give the path of a checkout")
    if path not in sys.path:
        sys.path.insert(0, path)


def epfml_powersgd(shapes: list[tuple[int, ...]], path: str, rank: int, iterations: int) -> Peer:
    checkout(path)
    powersgd = importlib.import_module("powersgd")
    parameters = [torch.zeros(shape) for shape in shapes]
    config = powersgd.Config(rank=rank, num_iters_per_step=iterations, start_compressing_after_num_steps=SKIP)
    aggregator = powersgd.PowerSGD(parameters, config)
    errors = [torch.zeros(shape) for shape in shapes]

    def exchange(flat: Tensor, views: list[Tensor]) -> Tensor:
        for error, view in zip(errors, views, strict=True):
            error.add_(view)
        # what it leaves in its arguments is the error to feed back
        torch.cat([result.flatten() for result in aggregator.aggregate(errors)], out=flat)
        return flat

    return exchange


GRACE = {
    "topk": {"compressor": "topk", "memory": "residual", "communicator": "allgather", "compress_ratio": 0.01},
    "randomk": {"compressor": "randomk", "memory": "residual", "communicator": "allreduce", "compress_ratio": 0.01},
    "efsignsgd": {"compressor": "efsignsgd", "memory": "efsignsgd", "communicator": "allgather", "lr": 1.0},
    "terngrad": {"compressor": "terngrad", "memory": "none", "communicator": "allgather"},
    "qsgd": {"compressor": "qsgd", "memory": "none", "communicator": "allgather"},
    "fp16": {"compressor": "fp16", "memory": "none", "communicator": "allreduce"},
}
"""Those of its compressors that run on a CPU and give the mean."""


def grace(shapes: list[tuple[int, ...]], path: str, name: str) -> Peer:
    checkout(path)
    helper = importlib.import_module("grace_dl.dist.helper")
    communicator = helper.grace_from_params({**GRACE[name], "world_size": dist.get_world_size()})

    def exchange(flat: Tensor, views: list[Tensor]) -> Tensor:
        results = [communicator.step(view.clone(), str(i)) for i, view in enumerate(views)]
        torch.cat([result.flatten() for result in results], out=flat)
        return flat

    return exchange


KINDS: dict[str, Callable[..., Peer]] = {
    "all_reduce": lambda shapes: all_reduce,
    "torch_fp16": torch_fp16,
    "torch_powersgd": torch_powersgd,
    "gradcomp": ours,
    "deepspeed_onebit": deepspeed_onebit,
    "hivemind": hivemind_averager,
    "epfml_powersgd": epfml_powersgd,
    "grace": grace,
}


# ---------------------------------------------------------------- measuring
class Calls:
    """Counts calls of torch.distributed's communication functions, by whatever library."""

    names = (
        "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all", "all_to_all_single",
        "reduce_scatter", "reduce_scatter_tensor", "broadcast", "send", "recv", "isend", "irecv", "gather", "scatter",
    )  # fmt: skip

    def __init__(self) -> None:
        self.count = 0
        for name in self.names:
            if hasattr(dist, name):
                setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return counted


def sent() -> int:
    """Bytes that this rank's end of the link has sent, with all headers and acknowledgements."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def say(**message: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(message), flush=True)


def barrier() -> None:
    dist.barrier()  # not among the counted functions


def run(asked: dict[str, list[Any]], steps: int, seed: int, shapes: list[tuple[int, ...]]) -> None:
    world, rank, calls = dist.get_world_size(), dist.get_rank(), Calls()
    gradients = Gradients(shapes, world, seed)
    peers: dict[str, Peer] = {}
    found: dict[str, dict[str, list[float]]] = {}
    sums: dict[str, Tensor] = {}
    for name, (kind, *arguments) in asked.items():
        try:
            peers[name] = KINDS[kind](shapes, *arguments)
        except Exception as error:  # the same on all ranks: a library that is missing, or does not fit
            say(peer=name, error=f"{type(error).__name__}: {error}")
            continue
        found[name] = {key: [] for key in ("ms", "cpu_ms", "bytes", "calls", "error")}
        sums[name] = torch.zeros(gradients.signal.numel())
    total = torch.zeros(gradients.signal.numel())
    for step in range(SKIP + steps):
        everyone = gradients(step)
        mean = sum(everyone[1:], start=everyone[0].clone()).div_(world)
        summed = SKIP <= step < SKIP + SUM_OF
        if summed:
            total += mean
        for name, peer in peers.items():
            flat = everyone[rank].clone()
            views = gradients.views(flat)
            getattr(peer, "prepare", lambda: None)()
            barrier()
            before, counted, cpu, begun = sent(), calls.count, time.process_time(), time.perf_counter()
            result = peer(flat, views)
            spent, cpu_spent = time.perf_counter() - begun, time.process_time() - cpu
            counted = calls.count - counted
            barrier()
            if step >= SKIP:
                one = found[name]
                one["ms"].append(1e3 * spent)
                one["cpu_ms"].append(1e3 * cpu_spent)
                one["bytes"].append(sent() - before)
                one["calls"].append(counted)
                one["error"].append(float((result - mean).norm() / mean.norm()))
            if summed:
                sums[name] += result
        say(step=step + 1)
    for name, one in found.items():
        slowest = torch.tensor(one["ms"], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        say(
            peer=name, ms=slowest.tolist(), cpu_ms=one["cpu_ms"], bytes=one["bytes"][-1], calls=one["calls"][-1],
            error_of_one=one["error"][0], error_of_sum=float((sums[name] - total).norm() / total.norm()),
        )  # fmt: skip


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "deepspeed", "hivemind"):
        if name in sys.modules:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = types.SimpleNamespace(**json.loads(sys.argv[1]))
    shapes = resnet18()[: plan.parameters]
    run(plan.peers, plan.steps, plan.seed, shapes)
    say(versions=versions())
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort at a normal exit, after all work is done


if __name__ == "__main__":
    main()
