"""One choice of trainer and compressor: its bytes, time and memory, and what binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gradcomp.bucket import ParameterTable
from gradcomp.compressors.base import require
from gradcomp.errors import UnsupportedError
from gradcomp.planner import memory, payload, timing, volume
from gradcomp.planner.model import Model
from gradcomp.planner.profile import Codec, Network, Profile, assumed_codec
from gradcomp.planner.volume import SCHEMES, Scheme
from gradcomp.registry import Spec, format_spec, parse_spec, without_unasked_feedback

DEFAULT_SCHEMES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp2-int8", "zero++", "diloco")
DEFAULT_COMPRESSORS = ("none", "fp16", "int8", "int4", "onebit", "topk", "powersgd")
ZERO_BUCKET = 50_000_000
"""Elements of ZeRO's ``reduce_bucket_size`` in the plan and in the configuration that it prints."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PCIE = 12e9
"""Bytes per second and direction between host and GPU, assumed (PCIe 3.0 x16)."""
HOST_MEMORY = 50e9
"""Bytes per second that Adam on the host moves, assumed."""
_ADAM_BYTES = 28
"""Bytes moved per parameter by Adam: fp32 weights, momentum and variance read and written, gradient read, weight written."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to plan for. Times in seconds, sizes in bytes.

    ``compute_seconds``: forward and backward of one micro-step without any communication; if None, ``6 n tokens / tflops``
    (8 with checkpointing, which computes forward twice). ``overlap``: whether exchanges may hide behind backward at all.
    """

    model: Model
    gpus: int
    network: Network
    gpus_per_node: int = 1
    device: str = "cuda"
    backend: str = "nccl"
    gpu_memory: float | None = None
    precision: str = "bf16"
    optimizer: str = "adam"
    offload: bool = False
    micro_batch: int = 1
    sequence: int = 2048
    accumulation: int = 1
    checkpointing: bool = True
    compute_seconds: float | None = None
    tflops: float = 125.0
    bucket_mb: float = 25.0
    overlap: bool = True
    schedule: str = "auto"
    local_steps: int = 100
    schemes: tuple[str, ...] = DEFAULT_SCHEMES
    compressors: tuple[str, ...] = DEFAULT_COMPRESSORS
    profile: Profile | None = None
    safe: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        whole = "a whole number of at least 1"
        for name in ("gpus", "gpus_per_node", "micro_batch", "sequence", "accumulation", "local_steps"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, whole)
        require(self.gpus <= 65536, "gpus", self.gpus, "at most 65536")
        require(
            self.gpus % self.gpus_per_node == 0, "gpus_per_node", self.gpus_per_node,
            f"a divisor of gpus={self.gpus}",
        )  # fmt: skip
        require(self.precision in _DTYPES, "precision", self.precision, ", ".join(_DTYPES))
        require(self.optimizer in memory.OPTIMIZERS, "optimizer", self.optimizer, ", ".join(memory.OPTIMIZERS))
        require(self.device in ("cuda", "cpu"), "device", self.device, "cuda or cpu")
        require(self.backend in ("nccl", "gloo"), "backend", self.backend, "nccl or gloo")
        require(self.bucket_mb > 0, "bucket_mb", self.bucket_mb, "a number above 0")
        require(self.tflops > 0, "tflops", self.tflops, "a number above 0")
        require(
            self.compute_seconds is None or self.compute_seconds > 0, "compute_seconds", self.compute_seconds,
            "a number above 0",
        )  # fmt: skip
        for name in self.schemes:
            require(name in SCHEMES, "schemes", name, ", ".join(SCHEMES))
        for spec in self.compressors:
            parse_spec(spec)
        timing.schedule_of(self.schedule, self.backend)

    @property
    def width(self) -> int:
        """Bytes per weight and gradient."""
        return memory.PRECISIONS[self.precision]

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step, of all GPUs."""
        return self.gpus * self.micro_batch * self.sequence * self.accumulation

    def compute(self) -> tuple[float, float]:
        """Seconds of forward and of backward of one micro-step."""
        measured = self.profile.compute if self.profile is not None else None
        if self.compute_seconds is None and measured is not None:
            return measured["forward"], measured["backward"]
        if self.compute_seconds is not None:
            part = 0.25 if self.checkpointing else 1 / 3
            return part * self.compute_seconds, (1 - part) * self.compute_seconds
        once = 2 * self.model.numel * self.micro_batch * self.sequence / (self.tflops * 1e12)
        return once, (3 if self.checkpointing else 2) * once

    def codec(self, spec: str) -> Codec:
        """Measured or assumed."""
        return self.profile.codec(spec) if self.profile is not None else assumed_codec(spec, self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A choice. Bytes are those that one rank sends per optimizer step; ``comm_seconds``: the link is busy for so long;
    ``exposed_seconds``: of it the step waits for so long."""

    scheme: str
    compressor: str
    bytes_per_rank: float
    comm_seconds: float
    exposed_seconds: float
    codec_seconds: float
    compute_seconds: float
    step_seconds: float
    memory_bytes: float
    memory: dict[str, float]
    host_memory_bytes: float
    fits: bool | None
    samples_per_second: float
    tokens_per_second: float
    binds: str
    why: str
    useful_ratio: float
    available: bool
    note: str = ""


def buckets_of(job: Job, scheme: Scheme, spec: str) -> list[payload.Bucket]:
    """The exchanges of one round of gradients, in the order of backward."""
    key = _Key(job.model, job.gpus, job.precision, job.bucket_mb, job.backend)
    return _buckets(key, scheme, format_spec(effective_spec(scheme, spec)))


def effective_spec(scheme: Scheme, spec: str) -> Spec:
    """What the integrations make of ``spec``: where gradients are sharded, no error feedback unless it is asked for."""
    return without_unasked_feedback(spec) if "gradients" in scheme.sharded else spec


@dataclass(frozen=True)
class _Key:
    model: Model
    gpus: int
    precision: str
    bucket_mb: float
    backend: str


@lru_cache(maxsize=256)
def _buckets(key: _Key, scheme: Scheme, spec: str) -> list[payload.Bucket]:
    model, ranks = key.model, key.gpus
    parameters = model.parameters(_DTYPES[key.precision])
    if scheme.gradients == "reduce-scatter":
        by_name = {p.name: p for p in parameters}
        units = [[by_name[t.name] for t in unit] for unit in model.units]
        found = [payload.scatter_run(unit, spec, ranks, scheme.trainer).on(key.backend) for unit in reversed(units)]
        return [bucket.scaled(model.scale) for bucket in found]
    if scheme.trainer == "deepspeed":
        layout = payload.deepspeed_buckets(parameters, ZERO_BUCKET)
    else:
        cap = int(key.bucket_mb * (1 << 20))
        layout = payload.ddp_buckets(parameters, min(payload.FIRST_BUCKET_BYTES, cap), cap)
    table = ParameterTable(parameters)
    return [payload.dry_run(bucket, spec, ranks, table).scaled(model.scale) for bucket in layout]


def predict(job: Job, scheme_name: str, spec: str, network: Network | None = None) -> Row:
    """One choice.

    Raises:
        UnsupportedError: the compressor does not fit the scheme. ConfigError: a bad spec.
    """
    scheme = SCHEMES[scheme_name]
    if scheme.name == "diloco":
        scheme = replace(scheme, local_steps=job.local_steps)
    network = network or job.network
    plain = (
        format_spec(spec) == "none"
    )  # kept as written, since error_feedback=true means something where it is the default
    if (scheme.name in ("zero++", "diloco") or scheme.trainer == "none") and not plain:
        raise UnsupportedError(f"{scheme.title} is planned with its own exchange only: allowed is none")
    n, ranks, width, micro = job.model.numel, job.gpus, job.width, job.accumulation
    _, backward = job.compute()
    single = ranks == 1
    buckets = [] if single else buckets_of(job, scheme, spec)

    step = step_time(job, scheme, spec, buckets, network)
    sent = scheme.gradient_rounds(micro) * sum(bucket.nbytes for bucket in buckets)
    sent += scheme.weight_rounds(micro) * volume.scatter(scheme.weight_bytes(width) * n, ranks)
    if scheme.name == "zero++":
        sent = volume.zero_plus_plus(n, ranks, job.gpus_per_node, micro_steps=micro)

    used = _memory(job, scheme, buckets, plain)
    on_gpu = sum(used.values())
    host = memory.model_states(n, ranks, job.precision, job.optimizer, scheme.sharded, job.offload).host
    fits = None if job.gpu_memory is None else on_gpu <= job.gpu_memory
    hidden_by = backward * scheme.gradient_rounds(micro)
    binds, why = _explain(step, fits, on_gpu, job)
    available, note = _availability(scheme, job, spec)
    return Row(
        scheme=scheme.name, compressor=spec if scheme.name != "zero++" else "built in",
        bytes_per_rank=sent, comm_seconds=step.link, exposed_seconds=step.exposed, codec_seconds=step.codec,
        compute_seconds=step.compute, step_seconds=step.total, memory_bytes=on_gpu, memory=used,
        host_memory_bytes=host, fits=fits, samples_per_second=job.tokens / job.sequence / step.total,
        tokens_per_second=job.tokens / step.total, binds=binds, why=why,
        useful_ratio=volume.useful_ratio(step.link, hidden_by), available=available, note=note,
    )  # fmt: skip


def step_time(job: Job, scheme: Scheme, spec: str, buckets: Sequence[payload.Bucket], network: Network) -> timing.Step:
    """One optimizer step of ``job``, with all its micro-steps."""
    forward, backward = job.compute()
    n, ranks, width, micro = job.model.numel, job.gpus, job.width, job.accumulation
    codec = None if format_spec(spec) == "none" else job.codec(spec)
    micro_compute = timing.compute_only(forward + backward)
    tail = timing.compute_only(_optimizer_seconds(job, scheme))
    if ranks == 1:
        return timing.compute_only(micro * micro_compute.total + tail.total)
    if scheme.name == "zero++":
        sent = volume.zero_plus_plus(n, ranks, job.gpus_per_node)
        link = network.seconds("AllGather", sent, ranks)
        total = max(forward + backward, link) if job.overlap else forward + backward + link
        once = timing.Step(total, forward + backward, link, 0.0)
    elif scheme.gradients == "reduce-scatter" and scheme.gathers_each_micro_step:
        units = [(bucket.numel, bucket) for bucket in reversed(buckets)]
        overlap = job.overlap and job.backend == "nccl"  # gloo works in turn
        weights = job.codec(scheme.weight_spec) if scheme.weight_spec else None
        once = timing.sharded_micro_step(
            units,
            forward,
            backward,
            scheme.weight_bytes(width),
            network,
            codec,
            ranks,
            scheme.gathers,
            overlap,
            weights,
        )
    else:
        # DDP overlaps by itself; DeepSpeed with `overlap_comm` on its own stream; compressed buckets by their schedule
        own = codec is None
        schedule = "pipeline:depth=1" if own else timing.schedule_of(job.schedule, job.backend)
        overlap = job.overlap and (scheme.trainer != "deepspeed" or (own and job.backend == "nccl"))
        exchange = timing.backward(buckets, backward, network, codec, ranks, schedule, overlap)
        once = timing.compute_only(forward) + exchange
    rounds = micro if scheme.each_micro_step else 1
    whole = timing.NOTHING
    for index in range(micro):
        whole += once if index < rounds else micro_compute
    if scheme.local_steps > 1:  # the exchange comes after H steps and hides behind nothing
        plain = micro * micro_compute.total
        extra = timing.backward(buckets, 0.0, network, codec, ranks, "inline", False)
        h = scheme.local_steps
        whole = timing.Step(plain + extra.total / h, plain, extra.link / h, extra.codec / h)
    if scheme.gathers and not scheme.gathers_each_micro_step:
        link = network.seconds("AllGather", volume.scatter(width * n, ranks), ranks)
        tail += timing.Step(link, 0.0, link, 0.0)
    return whole + tail


def _optimizer_seconds(job: Job, scheme: Scheme) -> float:
    measured = job.profile.compute if job.profile is not None else None
    part = job.gpus if "optimizer" in scheme.sharded else 1
    if measured is not None:
        return measured["optimizer"] / part
    n = job.model.numel / part
    if job.offload:
        # gradients down, weights up, Adam on the host: ZeRO-Offload (arXiv 2101.06840), section 4
        return 2 * job.width * n / PCIE + _ADAM_BYTES * n / HOST_MEMORY
    return _ADAM_BYTES * n / (1.2e12 if job.device == "cuda" else HOST_MEMORY)


def _memory(job: Job, scheme: Scheme, buckets: Sequence[payload.Bucket], plain: bool) -> dict[str, float]:
    model, n = job.model, job.model.numel
    states = memory.model_states(n, job.gpus, job.precision, job.optimizer, scheme.sharded, job.offload)
    used = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": memory.activations(
            layers=model.layers, hidden=model.hidden, heads=model.heads, vocabulary=model.vocabulary,
            batch=job.micro_batch, sequence=job.sequence, checkpointing=job.checkpointing, width=job.width,
        ),
        "trainer's buffers": memory.trainer_buffers(scheme.name, n, job.width, ZERO_BUCKET, model.largest_unit),
    }  # fmt: skip
    if scheme.name == "diloco":
        used["outer optimizer"] = memory.local_step_states(n)
    if not plain:
        used["gradcomp residuals"] = sum(bucket.residual for bucket in buckets)
        scratch = [bucket.scratch for bucket in buckets]
        # reduce-scatters run one at a time and share their buffers
        shared = max(scratch, default=0.0) if scheme.gradients == "reduce-scatter" else sum(scratch)
        used["gradcomp scratch"] = shared + sum(bucket.tables for bucket in buckets)
    return used


def _explain(step: timing.Step, fits: bool | None, used: float, job: Job) -> tuple[str, str]:
    """What binds, and one sentence."""
    if fits is False:
        assert job.gpu_memory is not None
        lacking = used - job.gpu_memory
        return "memory", f"does not fit: needs {used / 1e9:.1f} GB per GPU, {lacking / 1e9:.1f} GB too many"
    parts = {"link": step.exposed, "codec": step.codec, "compute": step.compute}
    binds = max(parts, key=lambda name: parts[name])
    if binds == "link":
        hidden = max(0.0, step.link - step.exposed)
        why = f"the link: {duration(step.exposed)} of {duration(step.total)} is waiting for it, and {duration(hidden)} is hidden"
    elif binds == "codec":
        why = f"the codec: {duration(step.codec)} of {duration(step.total)} is encoding and decoding"
    else:
        rest = f"the link adds {duration(step.exposed)}, coding {duration(step.codec)}"
        why = f"computing: {duration(step.compute)} of {duration(step.total)}; {rest}"
    return binds, why


def duration(seconds: float) -> str:
    """For people."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _availability(scheme: Scheme, job: Job, spec: str) -> tuple[bool, str]:
    """Whether to recommend it at all, and what to say of it."""
    if effective_spec(scheme, spec) != spec:
        name = parse_spec(spec)[0].name
        return (
            False,
            f"{name}: without error feedback, whose residual would be the whole model; error_feedback=true turns it on",
        )
    if scheme.name == "diloco":
        return False, f"another algorithm: {job.local_steps} local steps between exchanges; not in gradcomp"
    if scheme.name.endswith("-paper"):
        return False, "what the paper says; DeepSpeed 0.19.8 sends more"
    if scheme.name == "zero++":
        usable = job.device == "cuda" and job.gpus_per_node > 1
        why = "int4 gradients without error feedback" if usable else "DeepSpeed: CUDA and several GPUs per node only"
        return usable, why
    return True, ""
