"""DeepSpeed's ZeRO stages under each compressor: evaluation loss and bytes after 300 steps, against DeepSpeed alone.

    python benchmarks/zero_stages.py                # 2 and 3 ranks; rows are appended to results/zero_stages.jsonl
    python benchmarks/zero_stages.py --report       # the table of what is there

A small regression (a tanh network of 54 thousand parameters learns another one's outputs; AdamW, 3e-3, no clipping), the same
data for every case. It needs no GPU and no compiled DeepSpeed operation. Rows hold no times.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import schema
import torch
from torch import Tensor, nn

import gradcomp
from gradcomp.demo.launch import run_ranks

STOCK = "DeepSpeed alone"
SPECS = ("none", "fp16", "bf16", "int8", "int4", "onebit", "powersgd", "topk")
WITH_MEMORY = ("int4", "onebit", "powersgd", "topk")
MICRO_BATCH = 16


@dataclass(frozen=True)
class Case:
    """One training run."""

    stage: int
    spec: str
    ranks: int
    steps: int

    @property
    def allowed(self) -> bool:
        """Stage 3 reduce-scatters gradients, which these two compressors cannot."""
        return not (self.stage == 3 and self.spec.startswith(("powersgd", "topk")))


def grid(ranks: list[int], steps: int, stages: list[int], specs: list[str]) -> list[Case]:
    """All cases, stock first. From stage 2 on error feedback must be asked for, so both ways are run."""
    cases = []
    for world, stage in itertools.product(ranks, stages):
        asked = [f"{spec}:error_feedback=true" for spec in specs if spec in WITH_MEMORY] if stage >= 2 else []
        cases += [Case(stage, spec, world, steps) for spec in [STOCK, *specs, *asked]]
    return [case for case in cases if case.allowed]


# ---------------------------------------------------------------- on every rank
def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = [32, 128, 128, 128, 128, 4]
    hidden = [layer for a, b in itertools.pairwise(sizes[:-1]) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-2], sizes[-1]))


def batch(step: int, rank: int, rows: int = MICRO_BATCH) -> tuple[Tensor, Tensor]:
    """Fresh inputs for every step and rank, and what a fixed network says of them."""
    teacher = torch.Generator().manual_seed(5)
    first, second = torch.randn(32, 16, generator=teacher) / 4, torch.randn(16, 4, generator=teacher) / 4
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, torch.tanh(x @ first) @ second


def train(rank: int, case: Case) -> dict[str, Any]:
    import deepspeed

    model = network()
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_clipping": 0.0, "steps_per_print": 10**9,
        "zero_optimization": {"stage": case.stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    handle = None if case.spec == STOCK else gradcomp.register(engine, case.spec)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(engine(x), y)

    for step in range(case.steps):
        engine.backward(loss_of(*batch(step, rank)))
        engine.step()
    with torch.no_grad():
        loss = float(loss_of(*batch(1_000_000, 0, 2048)))
        everything = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(everything) if case.stage == 3 else nullcontext():
            bits = torch.cat([p.detach().flatten() for p in everything]).numpy().tobytes()
    stats = None if handle is None else handle.stats()
    return {
        "loss": loss,
        "digest": hashlib.sha256(bits).hexdigest(),
        "wire_bytes": None if stats is None else stats.wire_bytes,
        "ratio": None if stats is None else stats.ratio,
        "memory_bytes": None if stats is None else stats.memory_bytes,
    }


def work(rank: int, world: int, send: Callable[[str, Any], None], cases: list[Case]) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for a minute
        deepspeed.init_distributed("gloo")
        for case in cases:
            measured = train(rank, case)
            everyone: list[Any] = [None] * world
            torch.distributed.all_gather_object(everyone, measured["digest"])
            if rank == 0:
                send("row", (case, {**measured, "ranks_identical": len(set(everyone)) == 1}))


# ---------------------------------------------------------------- here
def key(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def run(cases: list[Case], out: Path) -> None:
    """Run what ``out`` does not hold yet, with one line of progress per run."""
    done = {key(dict(row.config)) for row in (schema.read(out) if out.exists() else [])}
    cases = [case for case in cases if key(asdict(case)) not in done]
    total, finished = len(cases), 0

    def on_message(kind: str, content: tuple[Case, dict[str, Any]]) -> None:
        nonlocal finished
        case, found = content
        measured = {name: value for name, value in found.items() if value is not None and name != "digest"}
        schema.append(out, [schema.Row.make("zero_stages", config=asdict(case), seed=0, measured=measured)])
        finished += 1
        sent = (
            "" if found["ratio"] is None else f", {found['ratio']:.1f}x fewer bytes, {found['memory_bytes']:,} B kept"
        )
        same = "" if found["ranks_identical"] else ", RANKS DIFFER"
        print(
            f"[{finished}/{total}] {case.ranks} ranks, ZeRO {case.stage}, {case.spec}: {found['loss']:.5f}{sent}{same}",
            flush=True,
        )

    print(f"{total} runs to do; {out} holds {len(done)}", flush=True)
    for ranks in sorted({case.ranks for case in cases}):
        run_ranks(work, ranks, ([case for case in cases if case.ranks == ranks],), on_message)


def report(out: Path) -> None:
    """Print one table per number of ranks and steps, in Markdown."""
    rows = schema.read(out)
    for ranks, steps in sorted({(row.config["ranks"], row.config["steps"]) for row in rows}):  # type: ignore[type-var]
        ours = [row for row in rows if (row.config["ranks"], row.config["steps"]) == (ranks, steps)]
        stock = {row.config["stage"]: row.number("loss") for row in ours if row.config["spec"] == STOCK}
        print(
            f"\n{ranks} ranks, {steps} steps; DeepSpeed alone ends at "
            + ", ".join(f"{stock[s]:.5f}" for s in sorted(stock))
        )  # type: ignore[type-var,index]
        print("\n| ZeRO | compressor | loss | against DeepSpeed alone | fewer bytes | residuals, bytes per rank |")
        print("|---|---|---|---|---|---|")
        for row in ours:
            if row.config["spec"] == STOCK:
                continue
            stage, loss = row.config["stage"], row.number("loss")
            print(
                f"| {stage} | `{row.config['spec']}` | {loss:.5f} | {100 * (loss / stock[stage] - 1):+.2f} % | "
                f"{row.number('ratio'):.1f}x | {row.number('memory_bytes'):,.0f} |"
            )
        if not all(row.measured["ranks_identical"] for row in ours):
            print("\nThe ranks ended with different parameters in some of these.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=(0, 1, 2, 3))
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="2 ranks, 4 steps, stages 0 and 3, int8: does it work?")
    parser.add_argument("--out", type=Path, default=schema.RESULTS / "zero_stages.jsonl", help="rows are appended here")
    parser.add_argument("--report", action="store_true", help="no runs: the tables of --out")
    arguments = parser.parse_args()
    if arguments.report:
        report(arguments.out)
        return
    cases = grid(arguments.ranks, arguments.steps, arguments.stages, arguments.specs)
    if arguments.quick:
        cases = grid([2], 4, [0, 3], ["none", "int8"])
    try:
        run(cases, arguments.out)
    except gradcomp.GradcompError as error:
        sys.exit(f"zero_stages: {error}")


if __name__ == "__main__":
    main()
