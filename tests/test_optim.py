"""The optimizers that exchange momentum: their arithmetic against the papers', and the guarantees, on two real ranks."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import Battery, Net

from gradcomp import ConfigError, GradcompError, MismatchError, UnsupportedError
from gradcomp.demo import data, models
from gradcomp.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from gradcomp.testing import launch

KINDS = {"adam": OneBitAdam, "lamb": OneBitLamb, "zero_one": ZeroOneAdam}
STAGES: dict[str, dict[str, Any]] = {
    "adam": {"freeze_step": 5},
    "lamb": {"freeze_step": 5},
    # gaps of 1, 1, 2, 2, 4: exact steps 1, 2, 3, 5, 7; from step 9 on meetings every 1, 1, 2, 2, 4 steps
    "zero_one": {"var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4},
}
SYNC_AT = 14  # the ranks meet in this step of ZeroOneAdam, and not in the one after it
everyone = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, parameters: Iterable[Any], **options: Any) -> Any:
    return KINDS[kind](parameters, **{"lr": 0.01, "backend": workers.BACKEND, **STAGES[kind], **options})


def grind(model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        workers.loss_of(model, step, rank).backward()
        optimizer.step()


def copies(optimizer: Any, *keys: str) -> list[Tensor]:
    states = [state for state in optimizer.state.values() if "exp_avg" in state]
    return [state[key].clone() for state in states for key in keys if key in state]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------- warm-up
def follow_adamw(rank: int, world: int, kind: str, clip: float) -> float:
    """The largest difference to AdamW on averaged, clipped gradients."""
    ours, theirs = Net(), Net()
    options = {"freeze_step": 99} if kind == "adam" else {"var_freeze_step": 99, "var_update_scaler": 99}
    one = make(kind, ours.parameters(), weight_decay=0.1, max_grad_norm=clip, **options)
    two = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(12):
        grind(ours, one, range(step, step + 1), rank)
        two.zero_grad()
        workers.loss_of(theirs, step, rank).backward()
        for p in theirs.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        assert not clip or norm > clip
        two.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def removed_update(rank: int, world: int) -> bool:
    """``bias_correction=False`` is the update of DeepSpeed's: m / (sqrt(v) + eps) + decay * x."""
    x = nn.Parameter(torch.ones(64, 64))
    optimizer = make("adam", [x], bias_correction=False, weight_decay=0.1)
    gradient = torch.full((64, 64), 0.5)
    x.grad = gradient.clone()
    optimizer.step()
    m, v = 0.1 * gradient, 0.001 * gradient**2
    return torch.allclose(x, 1 - 0.01 * (m / (v.sqrt() + 1e-8) + 0.1), atol=1e-6)


# ---------------------------------------------------------------- one compressed step, by hand
def one_bit(values: Tensor) -> Tensor:
    blocks = values.view(-1, 256)
    signs = torch.where(blocks < 0, -1.0, 1.0)
    return (signs * blocks.abs().mean(1, keepdim=True)).view_as(values)


def by_hand(rank: int, world: int) -> list[float]:
    """Differences of momentum and parameter to the paper's formulas, in the first two compressed steps."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(world)]
    x = nn.Parameter(torch.zeros(64, 64))
    optimizer = make("adam", [x], freeze_step=3)
    expected, m, v = torch.zeros(64, 64), torch.zeros(64, 64), torch.zeros(64, 64)
    errors, server = [torch.zeros(64, 64) for _ in range(world)], torch.zeros(64, 64)
    differences = []
    for t in range(1, 6):
        gradients = [torch.randn(64, 64, generator=g) + 0.3 for g in generators]
        x.grad = gradients[rank].clone()
        optimizer.step()
        if t <= 3:
            g = sum(gradients) / world
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        else:
            sums = [0.9 * m + 0.1 * g + e for g, e in zip(gradients, errors, strict=True)]
            sent = [one_bit(s) for s in sums]
            errors = [s - c for s, c in zip(sums, sent, strict=True)]
            mean = sum(sent) / world + server
            m = one_bit(mean)
            server = mean - m
        denominator = (v / (1 - 0.999 ** min(t, 3))).sqrt() + 1e-8
        expected = expected - 0.01 * m / (1 - 0.9**t) / denominator
        differences += [
            float((optimizer.state[x]["exp_avg"] - m).abs().max()),
            float((x - expected).detach().abs().max()),
        ]
    assert torch.allclose(optimizer.state[x]["exp_avg_sq"], v)
    return differences


def local_steps(rank: int, world: int) -> tuple[list[int], list[float]]:
    """0/1 Adam without compression against the paper's algorithm: steps with traffic, and differences after each."""
    options = {"var_freeze_step": 4, "var_update_scaler": 99, "local_step_scaler": 4, "local_step_clipper": 4}
    x = nn.Parameter(torch.zeros(40, 40))
    optimizer = make("zero_one", [x], compressor="none", **options)
    targets = [torch.randn(40, 40, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    xs = [torch.zeros(40, 40) for _ in range(world)]
    ms, us, start = [torch.zeros(40, 40)] * world, [torch.zeros(40, 40)] * world, torch.zeros(40, 40)
    v, total, calls, differences, busy = torch.zeros(40, 40), 0.0, 0, [], []
    for t in range(1, 21):
        optimizer.param_groups[0]["lr"] = lr = 0.01 / t
        x.grad = (x - targets[rank]).detach()
        optimizer.step()
        gradients = [value - target for value, target in zip(xs, targets, strict=True)]
        if t <= 4:
            g = sum(gradients) / world
            ms = [0.9 * ms[0] + 0.1 * g] * world
            v = 0.999 * v + 0.001 * g * g
        else:
            ms = [0.9 * m + 0.1 * g for m, g in zip(ms, gradients, strict=True)]
        size = lr / (1 - 0.9**t)
        denominator = (v / (1 - 0.999 ** min(t, 4))).sqrt() + 1e-8
        xs = [value - size * m / denominator for value, m in zip(xs, ms, strict=True)]
        if t > 4:
            us, total = [u + size * m for u, m in zip(us, ms, strict=True)], total + size
        if optimizer.meets(t) and t > 4:
            u = sum(us) / world
            limit = (denominator - 1e-8) * 0.1 / 0.001**0.5
            ms = [(u / total).clamp(-limit, limit)] * world
            xs, us, total = [start - total * ms[0] / denominator] * world, [u * 0] * world, 0.0
        if optimizer.meets(t):
            start = xs[0]
        if optimizer.stats().collectives > calls:
            busy.append(t)
        calls = optimizer.stats().collectives
        differences.append(float((x - xs[rank]).detach().abs().max()))
    return busy, differences


def lamb_by_hand(rank: int, world: int) -> list[float]:
    """Relative differences of 1-bit LAMB's coefficients to the paper's, on equal ranks without compression error."""
    x = nn.Parameter(torch.ones(64, 32) + torch.arange(32.0) / 32)
    optimizer = make("lamb", [x], compressor="fp16", freeze_step=4, weight_decay=0.01, betas=(0.9, 0.99))
    m, v, average, factor, differences = torch.zeros(64, 32), torch.zeros(64, 32), None, 1.0, []
    for t in range(1, 15):
        weights = x.detach().clone()
        gradient = torch.full((64, 32), 0.5) if t < 7 else torch.full((64, 32), 2.0**-6)
        x.grad = gradient.clone()
        optimizer.step()
        previous, m = m, 0.9 * m + 0.1 * gradient
        if t <= 4:
            v = fresh = 0.99 * v + 0.01 * gradient**2
        else:
            fresh = 0.99 * fresh + 0.01 * ((m - 0.9 * previous) / 0.1) ** 2
        denominator = (v / (1 - 0.99 ** min(t, 4))).sqrt() + 1e-8
        part = m / (1 - 0.9**t) / denominator
        update = part + 0.01 * weights
        if t <= 4:
            coefficient = min(max(float(weights.norm() / update.norm()), 0.01), 10.0)
            average = coefficient if average is None else 0.9 * average + 0.1 * coefficient
        else:
            raw = float((denominator / ((fresh / (1 - 0.99**t)).sqrt() + 1e-8)).max())
            share = min(1.0, float(part.norm() / update.norm()))
            raw = min(max(raw * share + 1 - share, 0.5), 4.0)
            factor = min(max(raw, 0.9 * factor), 1.1 * factor)
            coefficient = average * factor
        differences.append(abs(optimizer.get_lamb_coeffs()[0] / coefficient - 1))
    assert factor > 1.05, "the gradient shrinks, so the factor must grow"
    return differences


# ---------------------------------------------------------------- guarantees
def identical(rank: int, world: int, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    model = Net().to(dtype)
    optimizer = make(kind, model.parameters(), bucket_cap_mb=0.03, max_grad_norm=1.0)
    digests = []
    for step in range(20):
        optimizer.zero_grad()
        x, y = workers.batch(step, rank)
        F.mse_loss(model(x.to(dtype)).float(), y).backward()
        optimizer.step()
        digests.append(workers.digest(model))
    dtypes = {
        value.dtype for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    }
    met = [t for t in range(1, 21) if kind != "zero_one" or optimizer.meets(t)]
    if kind == "zero_one":
        optimizer.synchronize()
    return {"digests": digests, "met": met, "dtypes": dtypes, "end": workers.digest(model)}


def alone(rank: int, world: int, kind: str) -> tuple[list[float], int, int]:
    """Every rank in a process group of its own: losses before and after, skipped steps, and bytes."""
    own = [dist.new_group([other]) for other in range(world)][rank]
    model = Net()
    optimizer = make(kind, model.parameters(), process_group=own)
    losses = [workers.loss_of(model, 50, rank).item()]
    grind(model, optimizer, range(25), rank)
    losses.append(workers.loss_of(model, 50, rank).item())
    model.layers[0].weight.grad[0, 0] = math.inf
    optimizer.step()
    return losses, optimizer.skipped_steps, optimizer.stats().wire_bytes


def buckets_do_not_matter(rank: int, world: int, kind: str) -> tuple[list[str], list[int]]:
    digests, calls = [], []
    for cap, schedule in ((0.02, "thread"), (25.0, "auto")):
        model = Net()
        optimizer = make(kind, model.parameters(), bucket_cap_mb=cap, schedule=schedule)
        grind(model, optimizer, range(7), rank)
        before = optimizer.stats().collectives
        with workers.recorded_requests() as requests:
            grind(model, optimizer, range(7, 8), rank)
        assert optimizer.stats().collectives - before == len(requests)
        digests.append(workers.digest(model))
        calls.append(len(requests))
        optimizer.close()
    return digests, calls


def resume(rank: int, world: int, kind: str, dtype: torch.dtype, stop: int) -> tuple[str, str]:
    """Digests after going on without and with a detour through a file."""
    whole = Net().to(dtype)
    optimizer = make(kind, whole.parameters())
    run = lambda model, optimizer, steps: _grind_in(dtype, model, optimizer, steps, rank)  # noqa: E731
    run(whole, optimizer, range(stop))
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    run(whole, optimizer, range(stop, stop + 10))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = Net(seed=1).to(dtype)
    again.load_state_dict(saved["model"])
    other = make(kind, again.parameters())
    other.load_state_dict(saved["optimizer"])
    run(again, other, range(stop, stop + 10))
    return workers.digest(whole), workers.digest(again)


def _grind_in(dtype: torch.dtype, model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = workers.batch(step, rank)
        F.mse_loss(model(x.to(dtype)).float(), y).backward()
        optimizer.step()


def foreign_state(rank: int, world: int) -> str:
    """Every rank loads rank 0's state: a warning, and training goes on, alike on all ranks."""
    model = Net()
    optimizer = make("adam", model.parameters())
    grind(model, optimizer, range(8), rank)
    states = [optimizer.state_dict()]
    dist.broadcast_object_list(states, 0)
    other = make("adam", model.parameters())
    with pytest.warns(UserWarning, match="residuals start at zero"):
        other.load_state_dict(states[0])
    grind(model, other, range(8, 12), rank)
    with pytest.raises(ConfigError, match="OneBitLamb"):
        make("lamb", model.parameters()).load_state_dict(states[0])
    return workers.digest(model)


def nonfinite(rank: int, world: int, kind: str, value: str, at: int) -> bool:
    """Step ``at`` has ``value`` in one gradient of one rank: nothing changes on any rank."""
    model = Net()
    optimizer = make(kind, model.parameters())
    grind(model, optimizer, range(at), rank)

    def everything() -> list[Tensor]:
        exchange = optimizer.state_dict()["gradcomp"]["exchange"]
        residuals = [*exchange["worker"].values(), *(item["values"] for item in exchange["server"].values())]
        states = copies(optimizer, "exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
        return [*states, *(r.clone() for r in residuals), *(p.detach().clone() for p in model.parameters())]

    before = everything()
    optimizer.zero_grad()
    workers.loss_of(model, at, rank).backward()
    if rank == 1:
        model.layers[1].weight.grad[3, 3] = float(value)
    optimizer.step()
    unchanged = same(before, everything()) and optimizer.skipped_steps == 1
    grind(model, optimizer, range(at, at + 2), rank)
    return unchanged and not same(before, everything())


def scaled(rank: int, world: int, kind: str, unscale: bool) -> tuple[list[str], list[int]]:
    """With a GradScaler, an overflow on one rank only, at step 3 and 12: the same as without the step."""
    digests, skipped = [], []
    for use in (False, True):
        model = Net()
        optimizer = make(kind, model.parameters(), max_grad_norm=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=use)
        for step in range(14):
            optimizer.zero_grad()
            scaler.scale(workers.loss_of(model, step, rank)).backward()
            if step in (3, 12) and rank == 1:
                next(model.parameters()).grad[0, 0] = math.inf
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        if kind == "zero_one":
            optimizer.synchronize()
        digests.append(workers.digest(model))
        skipped.append(optimizer.skipped_steps)
    return digests, skipped


def clipped(rank: int, world: int, kind: str) -> list[float]:
    """Norms of momentum after gradients that are far too large, in the compressed stage."""
    model = Net()
    optimizer = make(kind, model.parameters(), max_grad_norm=0.1, rules=[("*", "onebit")])
    norms = []
    for step in range(8):
        optimizer.zero_grad()
        (1000 * workers.loss_of(model, step, rank)).backward()
        optimizer.step()
        norms.append(float(torch.stack([m.norm() for m in copies(optimizer, "exp_avg")]).norm()))
    return norms


def master(rank: int, world: int) -> tuple[float, float]:
    """Steps far below bf16's resolution add up; and weights that were loaded later are used."""
    x = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = make("adam", [x], lr=1e-4)
    for _ in range(60):
        x.grad = torch.ones_like(x)
        optimizer.step()
    moved = float(x.detach().float().mean())
    with torch.no_grad():
        x.fill_(4.0)
    x.grad = torch.ones_like(x)
    optimizer.step()
    return moved, float(x.detach().float().mean())


# ---------------------------------------------------------------- volume, freezing, zeros
def volume(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    optimizer = make("adam", model.parameters(), lr=1e-4, freeze_step=6, compressor="onebit:block=1024")
    with workers.recorded_requests() as requests:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(2, 512)).square().mean().backward()
            optimizer.step()
    stats = optimizer.stats()
    return {"stats": stats.as_dict(), "sent": sum(nbytes for _, nbytes in requests)}


def freezes(rank: int, world: int, grows_until: int, lr_warmup: int) -> list[int | None]:
    x = nn.Parameter(torch.zeros(64, 64))
    optimizer = make("adam", [x], betas=(0.9, 0.9), freeze_step="auto", lr_warmup_steps=lr_warmup)
    history = []
    for step in range(90):
        x.grad = torch.full((64, 64), 1.1 ** min(step, grows_until) * (1 + rank))
        optimizer.step()
        history.append(optimizer.frozen_at)
    return history


class Words(nn.Module):
    """An embedding of which some rows occur late, and a matrix of which some columns never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, rows: Tensor) -> Tensor:
        mask = torch.ones(32)
        mask[5:9] = 0
        return self.out(self.table(rows) * mask)


def zeros(rank: int, world: int) -> dict[str, bool]:
    model, start = Words(), Words()
    optimizer = make("adam", model.parameters(), module=model)
    for step in range(20):
        optimizer.zero_grad()
        rows = torch.arange(32) if step < 10 else torch.arange(48)
        model(rows).square().mean().backward()
        optimizer.step()
    stats = optimizer.stats()
    moved, moved_out = model.table.weight != start.table.weight, model.out.weight != start.out.weight
    return {
        "embedding": stats.bypassed["table.weight"] == "embedding" and "out.weight" not in stats.bypassed,
        "late rows move": bool(moved[32:48, 10:].all())
        and float((model.table.weight - start.table.weight).detach().abs().max()) < 1,
        "unseen rows stay": not moved[48:].any(),
        "zeros stay": not moved_out[:, 5:9].any() and bool(moved_out[:, 10:].all()),
    }


def quiet(rank: int, world: int, kind: str) -> float:
    """How far elements move whose gradient is a millionth of their block's, in steps of Adam's largest size."""
    x, generator = nn.Parameter(torch.ones(64, 64)), torch.Generator().manual_seed(rank)
    optimizer = make(kind, [x], lr=1e-3)
    scale = torch.ones(64, 64)
    scale[:, 7] = 1e-6
    for _ in range(20):
        x.grad = torch.randn(64, 64, generator=generator) * scale
        optimizer.step()
    if kind == "zero_one":
        optimizer.synchronize()
    return float((x.detach()[:, 7] - 1).abs().max()) / (20 * 1e-3 * 0.1 / 0.001**0.5)


def groups(rank: int, world: int) -> dict[str, str]:
    model = Net()
    first, *others = model.named_parameters()
    optimizer = make("adam", [{"params": [first], "non_freeze": True}, {"params": others, "lr": 0.001}])
    grind(model, optimizer, range(8), rank)
    return dict(optimizer.stats().bypassed)


# ---------------------------------------------------------------- DDP
def under_ddp(rank: int, world: int, kind: str) -> list[str]:
    """Plain replicas, an attached DDP module, DDP given as ``module``, and no_sync: the same bits."""
    digests = []
    for way in ("plain", "attach", "module", "no_sync"):
        net = Net()
        model = net if way == "plain" else workers.wrap(net)
        optimizer = make(kind, model.parameters(), module={"plain": net, "module": model}.get(way))
        if way == "attach":
            optimizer.attach(model)
        if way == "no_sync":
            optimizer.attach(net)
        for step in range(SYNC_AT):
            optimizer.zero_grad()
            with workers.without_sync(model, way == "no_sync"):
                workers.loss_of(model, step, rank).backward()
            if way == "attach" and step == 0:
                local = [p.grad.clone() for p in net.parameters()]
                others = [torch.zeros_like(g) for g in local]
                for mine, theirs in zip(local, others, strict=True):
                    dist.broadcast(theirs.copy_(mine), 0)
                assert (rank == 0) == same(local, others), "gradients must stay local"
            optimizer.step()
        digests.append(workers.digest(net))
    return digests


def wrong_ddp(rank: int, world: int) -> list[str]:
    said = []
    model = workers.wrap(Net())
    optimizer = make("adam", model.parameters())
    for attempt in (
        lambda: grind(model, optimizer, range(1), rank),
        lambda: make("adam", workers.setup("int8")[0].parameters()).attach(workers.setup("int8")[0]),
        lambda: optimizer.attach(model),
    ):
        with pytest.raises(GradcompError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def disagree(rank: int, world: int) -> str:
    model = Net()
    optimizer = make("adam", model.parameters(), freeze_step=5 + rank)
    with pytest.raises(MismatchError) as caught:
        grind(model, optimizer, range(1), rank)
    return str(caught.value)


# ---------------------------------------------------------------- a real problem
LM_STEPS = 120


def language_model(rank: int, world: int, kind: str | None) -> dict[str, float]:
    """Evaluation loss of the demo's byte model on the standard library's source."""
    dataset = data.load("text", rank, world)
    torch.manual_seed(0)
    ddp = DDP(models.build("text", 0))
    options = {
        "adam": {"freeze_step": LM_STEPS // 4},
        "zero_one": {"var_freeze_step": LM_STEPS // 2, "local_step_scaler": LM_STEPS // 4, "local_step_clipper": 2},
    }
    optimizer: Any = (
        torch.optim.AdamW(ddp.parameters(), lr=2e-3)
        if kind is None
        else make(kind, ddp.parameters(), module=ddp, lr=2e-3, weight_decay=0.01, **options[kind])
    )
    batches = torch.Generator().manual_seed(rank)
    rise = LM_STEPS // 8
    for step in range(LM_STEPS):
        optimizer.param_groups[0]["lr"] = 2e-3 * min((step + 1) / rise, (LM_STEPS - step) / (LM_STEPS - rise))
        inputs, targets = dataset.batch(2, batches)
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    if kind == "zero_one":
        optimizer.synchronize()
    inputs, targets = dataset.evaluation_share(0, 4)
    with torch.no_grad():
        loss = float(F.cross_entropy(ddp.module(inputs).flatten(0, 1), targets.flatten()))
    return {"loss": loss, "ratio": 1.0 if kind is None else optimizer.stats().ratio}


TYPES = (torch.float32, torch.bfloat16)
CASES: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{("adamw", kind, clip): (follow_adamw, (kind, clip)) for kind in ("adam", "zero_one") for clip in (0.0, 0.05)},
    **{("identical", kind, dtype): (identical, (kind, dtype)) for kind in KINDS for dtype in TYPES},
    **{("resume", kind, d, stop): (resume, (kind, d, stop)) for kind in KINDS for d in TYPES for stop in (3, 15)},
    **{("nonfinite", kind, v, at): (nonfinite, (kind, v, at)) for kind in KINDS for v in ("inf", "nan") for at in (2, 7)},
    **{("scaled", kind, unscale): (scaled, (kind, unscale)) for kind in KINDS for unscale in (False, True)},
    **{(fn.__name__, kind): (fn, (kind,)) for fn in (buckets_do_not_matter, under_ddp, clipped, quiet) for kind in KINDS},
    **{("freezes", *args): (freezes, args) for args in ((0, 0), (0, 25), (30, 0), (99, 0))},
    **{
        fn.__name__: (fn, ())
        for fn in (
            removed_update, by_hand, local_steps, lamb_by_hand, foreign_state, master, volume, zeros, groups, wrong_ddp, disagree
        )
    },
}  # fmt: skip
RUN = Battery(2, CASES, timeout=110)
THREE = Battery(
    3,
    {(fn.__name__, kind): (fn, (kind, *rest)) for kind in KINDS for fn, rest in ((identical, TYPES[:1]), (alone, ()))},
    timeout=110,
)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("kind", ["adam", "zero_one"])
def test_warm_up_is_adamw(kind: str, clip: float) -> None:
    assert max(RUN["adamw", kind, clip]) < 2e-6


def test_without_bias_correction_it_is_the_removed_update() -> None:
    assert all(RUN["removed_update"])


def test_compressed_steps_are_the_papers() -> None:
    for differences in RUN["by_hand"]:
        assert max(differences) < 1e-5


def test_local_steps_are_the_papers_and_leave_rounds_out() -> None:
    for busy, differences in RUN["local_steps"]:
        assert busy == [*range(1, 9), 10, 12, 16, 20]
        assert max(differences) < 1e-5


def test_lamb_coefficients_are_the_papers() -> None:
    for differences in RUN["lamb_by_hand"]:
        assert max(differences) < 0.01, "fp16 rounds the momentum from which gradients are reconstructed"


@everyone
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_ranks_hold_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    one, two = RUN["identical", kind, dtype]
    assert len(set(one["digests"])) >= 18, "the parameters must move"
    assert all(one["digests"][t - 1] == two["digests"][t - 1] for t in one["met"])
    assert one["end"] == two["end"]
    assert one["dtypes"] == {torch.float32}
    if kind == "zero_one":
        assert one["met"] == [*range(1, 13), 14, 16, 20]
        assert one["digests"][SYNC_AT] != two["digests"][SYNC_AT]


@everyone
def test_three_ranks(kind: str) -> None:
    results = THREE["identical", kind]
    assert len({result["end"] for result in results}) == 1
    assert len(set(results[0]["digests"])) >= 18


@everyone
def test_a_group_of_one_rank_trains_without_traffic(kind: str) -> None:
    for losses, skipped, sent in THREE["alone", kind]:
        assert losses[1] < 0.7 * losses[0]
        assert (skipped, sent) == (int(kind != "zero_one"), 0)


@everyone
def test_buckets_and_schedules_change_nothing_but_the_number_of_collectives(kind: str) -> None:
    for digests, calls in RUN["buckets_do_not_matter", kind]:
        assert digests[0] == digests[1]
        assert calls[1] == 2
        assert calls[0] > 2


@everyone
@pytest.mark.parametrize("stop", [3, 15])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_resuming_is_bit_exact(kind: str, dtype: torch.dtype, stop: int) -> None:
    for whole, again in RUN["resume", kind, dtype, stop]:
        assert whole == again


def test_other_ranks_states_reset_residuals_with_a_warning() -> None:
    assert len(set(RUN["foreign_state"])) == 1


@everyone
@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("at", [2, 7])
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(kind: str, value: str, at: int) -> None:
    assert all(RUN["nonfinite", kind, value, at])


@everyone
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(kind: str, unscale: bool) -> None:
    results = RUN["scaled", kind, unscale]
    assert len({digest for digests, _ in results for digest in digests}) == 1
    # the second overflow meets 0/1 Adam in a local step, which only the rank itself leaves out
    assert all(skipped == ([1, 1] if kind == "zero_one" else [2, 2]) for _, skipped in results)


@everyone
def test_clipping_bounds_momentum(kind: str) -> None:
    for norms in RUN["clipped", kind]:
        assert all(norm <= 0.1 * (1 + 1e-5) for norm in norms)
        assert norms[-1] > 0.005


def test_bf16_has_fp32_master_weights() -> None:
    for moved, loaded in RUN["master"]:
        assert abs(moved - (1 - 60e-4)) < 2e-3
        assert loaded == pytest.approx(4.0, abs=0.02)


def test_volume_of_the_whole_run() -> None:
    for result in RUN["volume"]:
        stats, warmup = result["stats"], 6 / 30
        assert stats["wire_bytes"] == pytest.approx(result["sent"], rel=1e-3)
        assert stats["ratio"] == pytest.approx(1 / (warmup + (1 - warmup) / 32), rel=0.01)
        assert stats["ratio_per_step"] > 30.5
        assert (stats["steps"], stats["compressed_steps"], stats["skipped_steps"]) == (30, 24, 0)


def test_automatic_freeze() -> None:
    """The window is 10 steps: constant gradients settle with the first full one, growing ones do not."""
    for arguments, step in (((0, 0), 11), ((0, 25), 25), ((99, 0), None)):
        for history in RUN[("freezes", *arguments)]:
            assert history[-1] == step
            assert step is None or history.index(step) == step - 1
    for history in RUN["freezes", 30, 0]:
        assert history[-1] is not None
        assert 50 < history[-1] < 80


def test_zeros_and_embeddings() -> None:
    for facts in RUN["zeros"]:
        assert all(facts.values()), facts


@everyone
def test_elements_of_small_variance_move_no_further_than_under_adam(kind: str) -> None:
    most = 40 if kind == "lamb" else 1  # max_coeff times factor_max
    assert all(0 < distance <= most for distance in RUN["quiet", kind])


def test_groups_and_names() -> None:
    for bypassed in RUN["groups"]:
        assert bypassed["layers.0.weight"].startswith("rule")
        assert "layers.1.weight" not in bypassed
        assert bypassed["layers.1.bias"] == "vector"


@everyone
def test_plain_attached_and_no_sync_are_the_same(kind: str) -> None:
    for digests in RUN["under_ddp", kind]:
        assert len(set(digests)) == 1


def test_wrong_use_of_ddp_is_refused() -> None:
    for averaged, hooked, late in RUN["wrong_ddp"]:
        assert "optimizer.attach(ddp)" in averaged
        assert "communication hook" in hooked
        assert "before the first step" in late


def test_ranks_with_other_options_are_refused() -> None:
    for text in RUN["disagree"]:
        assert "same arguments" in text


def test_policies_of_zero_one_adam() -> None:
    x = nn.Parameter(torch.zeros(1))
    optimizer = ZeroOneAdam([x], var_freeze_step=40, var_update_scaler=2, local_step_scaler=6, local_step_clipper=4)
    updates = [t for t in range(1, 60) if optimizer.updates_variance(t)]
    assert updates == [1, 2, 3, 5, 7, 11, 15, 23, 31]
    meetings = [t for t in range(41, 71) if optimizer.meets(t)]
    assert meetings == [*range(41, 47), 48, 50, 52, 56, 58, 62, 64, 68, 70]


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("adam", {"freeze_step": 0}, "freeze_step=0: allowed is a whole number of at least 1"),
        ("lamb", {"freeze_step": 0}, "freeze_step=0"),
        ("adam", {"freeze_step": "soon"}, "'auto'"),
        ("adam", {"freeze_threshold": 1.5}, "freeze_threshold=1.5"),
        ("zero_one", {"var_freeze_step": 0}, "var_freeze_step=0"),
        ("zero_one", {"local_step_clipper": 0}, "local_step_clipper=0"),
        ("adam", {"amsgrad": True}, "amsgrad=True"),
        ("adam", {"lr": -1.0}, "lr=-1.0"),
        ("adam", {"betas": (0.9, 1.0)}, "betas="),
        ("adam", {"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ("lamb", {"min_coeff": 0.0}, "min_coeff=0.0"),
        ("lamb", {"factor_threshold": 2.0}, "factor_threshold=2.0"),
        ("adam", {"compressor": "two-bit"}, "two-bit"),
    ],
)
def test_refused_options(kind: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(kind, [nn.Parameter(torch.zeros(2))], **options)
    assert text in str(caught.value)


def test_refused_parameters_and_missing_group() -> None:
    with pytest.raises(ConfigError, match="complex64"):
        make("adam", [nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    optimizer = make("adam", [nn.Parameter(torch.zeros(2))])
    with pytest.raises(UnsupportedError, match="init_process_group"):
        optimizer.step()


@everyone
def test_an_old_configuration_is_accepted(kind: str) -> None:
    old = {"lr": 4e-4, "weight_decay": 0.01, "bias_correction": False, "cuda_aware": False, "comm_backend_name": "nccl"}
    with pytest.warns(UserWarning, match="cuda_aware, comm_backend_name: ignored"):
        make(kind, [nn.Parameter(torch.zeros(2))], **old)


@pytest.mark.slow
def test_a_language_model_ends_within_two_percent_of_adamw() -> None:
    cases = {kind: (language_model, (kind,)) for kind in (None, "adam", "zero_one")}
    outcomes = launch(workers.battery, 2, cases, timeout=115)
    results = {kind: outcome.value[kind] for outcome in outcomes[:1] for kind in cases}
    assert all(ok for ok, _ in results.values()), results
    losses = {kind: value["loss"] for kind, (_, value) in results.items()}
    assert losses[None] < 3.0
    assert losses["adam"] < 1.02 * losses[None], losses
    assert losses["zero_one"] < 1.02 * losses[None], losses
    assert results["adam"][1]["ratio"] > 2.5
