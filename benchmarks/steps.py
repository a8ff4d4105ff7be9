"""What one rank of network.py does: training steps of one model under many kinds of gradient exchange, in turns.

Started once per host with a :class:`Plan` as its argument. All trials (a model with its exchange) live at the same time and
take turns, a few steps each, so that whatever else the machine does meets all of them. Rank 0 prints JSON lines.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradcomp

NO_COMMUNICATION = "no communication"
NO_HOOK = "no hook"
TORCH_FP16 = "torch fp16 hook"
TORCH_POWERSGD = "torch PowerSGD hook, rank 4"
_SLOW = 1.0  # seconds of a step in which cold caches do not show
BASELINES = (NO_COMMUNICATION, NO_HOOK, TORCH_FP16, TORCH_POWERSGD)
UNTIMED = 3  # kernels are compiled, buckets rebuilt, buffers made


@dataclass(frozen=True)
class Plan:
    """``exchanges``: names above, or gradcomp specs. ``seconds``: the budget of timed steps for each."""

    exchanges: list[str]
    trainer: str = "ddp"
    model: str = "mlp"
    batch: int = 8
    bucket_mb: float | None = None
    rounds: int = 3
    seconds: float = 3.0
    most_steps: int = 24
    seed: int = 0

    def dump(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


@dataclass
class Trial:
    """One kind of exchange: ``payload`` gives the bytes that this rank has sent in the last step, without headers."""

    name: str
    step: Callable[[Tensor, Tensor], None]
    payload: Callable[[], float]
    codec: Callable[[], float] = lambda: 0.0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    codec_seconds: list[float] = field(default_factory=list)
    link_bytes: int = 0
    steps: int = 1
    untimed: int = UNTIMED
    slow: bool = False


# ---------------------------------------------------------------- models
class MLP(nn.Sequential):
    """1024-2048-2048-2048-10: 10.5 M parameters, nearly no computation for each, so that the exchange shows."""

    def __init__(self) -> None:
        sizes = [1024, 2048, 2048, 2048]
        hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(sizes[-1], 10))

    @staticmethod
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        return torch.randn(size, 1024, generator=generator), torch.randint(10, (size,), generator=generator)


class Transformer(nn.Module):
    """A byte-level transformer of 8 layers, width 512: 25.4 M parameters in matrices, an embedding, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, 512), nn.Parameter(torch.zeros(64, 512))
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(512, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        logits: Tensor = self.head(self.layers(x, mask=self.mask, is_causal=True))
        return logits.flatten(0, 1)

    @staticmethod
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """``size`` sequences of 64 bytes, and the next bytes."""
        tokens = torch.randint(256, (size, 65), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].flatten()


MODELS: dict[str, Any] = {"mlp": MLP, "transformer": Transformer}


# ---------------------------------------------------------------- exchanges
@contextmanager
def one_bucket() -> Iterator[None]:
    """DDP models made inside hold everything in one bucket, in the first step as well.

    With several, torch's PowerSGD hook aborts on gloo: it issues collectives in callbacks, in another order on each rank.
    """
    before = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30
    try:
        yield
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = before


def ddp_trial(name: str, plan: Plan) -> Trial:
    """Plain DDP with torch's defaults, and ``name``'s hook."""
    torch.manual_seed(plan.seed)
    model = MODELS[plan.model]()
    buckets = {} if plan.bucket_mb is None else {"bucket_cap_mb": plan.bucket_mb}
    if name == TORCH_POWERSGD:
        with one_bucket():
            ddp = DistributedDataParallel(model, bucket_cap_mb=1000, init_sync=False)
    else:
        ddp = DistributedDataParallel(model, init_sync=False, **buckets)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()

    ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
    numel = sum(p.numel() for p in model.parameters())
    if name == NO_COMMUNICATION:
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)
        return Trial(name, step, lambda: 0)
    if name == NO_HOOK:
        return Trial(name, step, lambda: ring * 4 * numel)
    if name == TORCH_FP16:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return Trial(name, step, lambda: ring * 2 * numel)
    if name == TORCH_POWERSGD:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        # the state counts the elements of all compressed steps
        # and is uncompressed in its first two
        return Trial(name, step, lambda: ring * 4 * numel / state.compression_stats()[0], untimed=UNTIMED + 2)
    handle = gradcomp.register(ddp, name)

    def codec() -> float:
        stats = handle.stats()
        return stats.encode_seconds + stats.decode_seconds

    return Trial(name, step, lambda: handle.stats().wire_bytes_per_step, codec)


def deepspeed_name(stage: int, spec: str | None = None) -> str:
    """The exchange of a ZeRO stage, with DeepSpeed's own collectives or gradcomp's."""
    return f"DeepSpeed ZeRO-{stage}" + (f", {spec}" if spec else "")


def deepspeed_trial(name: str, plan: Plan) -> Trial:
    """A DeepSpeed engine; ``name`` as :func:`deepspeed_name` makes it."""
    import deepspeed

    stage, _, spec = name.removeprefix("DeepSpeed ZeRO-").partition(", ")
    torch.manual_seed(plan.seed)
    model = MODELS[plan.model]()
    config = {
        "train_micro_batch_size_per_gpu": plan.batch, "gradient_accumulation_steps": 1, "steps_per_print": 10**9,
        "zero_optimization": {"stage": int(stage), "overlap_comm": False}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    handle = gradcomp.register(engine, spec) if spec else None

    def step(inputs: Tensor, targets: Tensor) -> None:
        engine.backward(F.cross_entropy(engine(inputs), targets))
        engine.step()

    if handle is None:
        return Trial(name, step, lambda: 0)

    def codec() -> float:
        stats = handle.stats()
        return stats.encode_seconds + stats.decode_seconds

    return Trial(name, step, lambda: handle.stats().wire_bytes_per_step, codec)


def start_deepspeed() -> None:
    """On CPU and gloo, without compiling operations."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for one machine only, and compiled for a minute
    deepspeed.init_distributed("gloo")


# ---------------------------------------------------------------- measuring
def sent() -> int:
    """Bytes that this rank's end of the link has sent, with all headers and acknowledgements."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def timed_step(trial: Trial, inputs: Tensor, targets: Tensor) -> None:
    dist.barrier()
    codec, cpu, begun = trial.codec(), time.process_time(), time.perf_counter()
    trial.step(inputs, targets)
    trial.seconds.append(time.perf_counter() - begun)
    trial.cpu_seconds.append(time.process_time() - cpu)
    trial.codec_seconds.append(trial.codec() - codec)


def slowest(seconds: list[float]) -> list[float]:
    """A step takes as long as on its slowest rank."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [float(value) for value in values]


def say(**message: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(message), flush=True)


def measure(plan: Plan) -> None:
    generator = torch.Generator().manual_seed(1000 * plan.seed + dist.get_rank())
    batches = [MODELS[plan.model].batch(plan.batch, generator) for _ in range(8)]
    trials = []
    for name in plan.exchanges:
        trial = deepspeed_trial(name, plan) if plan.trainer == "deepspeed" else ddp_trial(name, plan)
        for i in range(trial.untimed):
            timed_step(trial, *batches[i])
        last = slowest(trial.seconds[-1:])[0]  # the same on all ranks, and so is the number of steps
        trial.slow = last > _SLOW
        trial.steps = max(1, min(plan.most_steps, round(plan.seconds / last)) // plan.rounds)
        trial.seconds, trial.cpu_seconds, trial.codec_seconds = [], [], []
        trials.append(trial)
        say(ready=name)
    for turn in range(plan.rounds):
        for trial in trials:
            if not trial.slow:
                trial.step(*batches[0])  # the caches hold the trial before's memory
            dist.barrier()
            before = sent()
            for i in range(trial.steps):
                timed_step(trial, *batches[i % len(batches)])
            dist.barrier()  # all has left; barriers themselves send some hundred bytes
            trial.link_bytes += sent() - before
        say(round=turn + 1)
    for trial in trials:
        seconds, cpu, codec = (
            [1e3 * value for value in slowest(values)]
            for values in (trial.seconds, trial.cpu_seconds, trial.codec_seconds)
        )
        link_bytes = trial.link_bytes // len(seconds)
        say(
            exchange=trial.name,
            step_ms=seconds,
            cpu_ms=cpu,
            codec_ms=codec,
            payload_bytes=trial.payload(),
            link_bytes=link_bytes,
        )


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    if plan.trainer == "deepspeed":
        start_deepspeed()
    measure(plan)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort at a normal exit, after all work is done


if __name__ == "__main__":
    main()
