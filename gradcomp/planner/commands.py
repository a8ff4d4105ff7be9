"""The commands ``gradcomp plan`` and ``gradcomp probe``. Needs the extra ``cli``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from gradcomp.compressors.base import require
from gradcomp.errors import GradcompError
from gradcomp.registry import parse_specs
from gradcomp.terminal import make_console, print_json, reporting

PLAN_HELP = """Predict step time and memory of each trainer and compressor on your link, and say what to use, if anything.

The model is given by --params, by a Hugging Face --config, or in a TOML file (sections model, cluster, training, compare; \
flags override it). Link and codecs are assumed unless --profile names what gradcomp probe measured. Bytes come from \
gradcomp's own wire format. The answer may be: do not compress.

Examples:

    gradcomp plan --params 7e9 --gpus 8 --link 10Gbps --precision bf16

    gradcomp plan --config config.json --gpus 16 --gpus-per-node 4 --link 25Gbps --memory 40GB --compute-seconds 0.8

    gradcomp plan job.toml --profile probe.json --plot plan.png

    gradcomp plan --params 7e9 --gpus 8 --link 10Gbps --json
"""
PROBE_HELP = """Measure link, codecs and, if you like, your own step, for gradcomp plan --profile. Run it under torchrun.

Times each collective at several sizes and fits latency and bandwidth (with residuals), and each compressor's encoding and \
decoding, on all ranks at once: ranks that share cores or a link are measured as they will run. --step names a Python \
file with a function make() that returns a torch module and a function of it that runs forward and returns the loss.

Examples:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint host:29500 -m gradcomp probe --link 10Gbps --out probe.json

    torchrun --nproc-per-node 2 -m gradcomp probe --link 1Gbps --step mytrain.py
"""


def plan(
    file: Annotated[Path | None, typer.Argument(help="A TOML file; flags override it.")] = None,
    params: Annotated[
        float | None, typer.Option(help="Parameters, e.g. 7e9: a LLaMA-like transformer is assumed.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The model's Hugging Face config.json.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs in all. [8]")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs that share a network card. [1]")] = None,
    link: Annotated[str | None, typer.Option(help="Of a network card, each way: 10Gbps, 100Mbps. [10Gbps]")] = None,
    latency: Annotated[str | None, typer.Option(help="Per message, e.g. 50us.")] = None,
    mtu: Annotated[int | None, typer.Option(help="9000 with jumbo frames. [1500]")] = None,
    rdma: Annotated[bool | None, typer.Option("--rdma", help="RoCE instead of TCP.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of a GPU, e.g. 40GB; without it, all is taken to fit.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. [cuda]")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. [bf16]")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adam8bit or sgd. [adam]")] = None,
    offload: Annotated[bool | None, typer.Option("--offload", help="Optimizer states in host memory.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per GPU and micro-step. [1]")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens per sequence. [2048]")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-steps per optimizer step. [1]")] = None,
    checkpointing: Annotated[bool | None, typer.Option(help="Of activations. [on]")] = None,
    compute_seconds: Annotated[
        str | None, typer.Option(help="Measured forward and backward of one micro-step without communication.")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="A GPU reaches, if that time is not known. [125]")] = None,
    bucket_mb: Annotated[float | None, typer.Option(help="DDP's bucket_cap_mb. [25]")] = None,
    schemes: Annotated[
        str | None,
        typer.Option(
            help="Of ddp, zero1, zero2, zero3, fsdp2, fsdp2-keep, fsdp2-int8, zero1-paper, zero2-paper, zero++, diloco"
        ),
    ] = None,
    compressors: Annotated[str | None, typer.Option(help='Specs separated by commas, or "all".')] = None,
    profile: Annotated[Path | None, typer.Option(help="What gradcomp probe wrote.")] = None,
    safe: Annotated[
        bool | None, typer.Option("--safe", help="Recommend only what costs no accuracy as measured.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all rows.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Step time against link speed, as PNG (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """See ``PLAN_HELP``."""
    with reporting():
        from gradcomp.planner import decide, report
        from gradcomp.planner.config import make_job, read_toml

        if plot is not None and find_spec("matplotlib") is None:
            raise GradcompError("--plot needs matplotlib: pip install 'gradcomp[bench]'")
        flags: dict[str, dict[str, Any]] = {
            "model": {"params": params, "config": config},
            "cluster": {
                "gpus": gpus, "gpus_per_node": gpus_per_node, "link": link, "latency": latency, "mtu": mtu,
                "rdma": rdma, "memory": memory, "device": device, "profile": profile,
            },
            "training": {
                "precision": precision, "optimizer": optimizer, "offload": offload, "micro_batch": micro_batch,
                "sequence": sequence, "accumulation": accumulation, "checkpointing": checkpointing,
                "compute_seconds": compute_seconds, "tflops": tflops, "bucket_mb": bucket_mb,
            },
            "compare": {
                "schemes": None if schemes is None else [name.strip() for name in schemes.split(",")],
                "compressors": None if compressors is None else list(parse_specs(compressors, canonical=False)),
                "safe": safe,
            },
        }  # fmt: skip
        job = make_job(read_toml(file) if file is not None else {}, flags)
        made = decide.plan(job)
        if as_json:
            print_json(report.as_json(made))
        else:
            report.print_plan(made, make_console(), everything)
        if plot is not None:
            from gradcomp.planner import plot as plotting

            try:
                plotting.save(plot, made)
            except OSError as error:
                require(False, "plot", str(plot), f"a file that can be written: {error}")
            if not as_json:
                make_console().print(f"Wrote {plot}.", highlight=False, markup=False)


def probe(
    link: Annotated[str, typer.Option(help="Nominal speed of a network card, each way; for planning other speeds.")],
    out: Annotated[Path, typer.Option(help="The profile that is written.")] = Path("gradcomp-probe.json"),
    compressors: Annotated[str, typer.Option(help='Specs separated by commas, or "all".')] = "all",
    largest: Annotated[str, typer.Option(help="Largest message.")] = "32MB",
    step: Annotated[Path | None, typer.Option(help="A Python file with make(), see above.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """See ``PROBE_HELP``."""
    with reporting():
        from gradcomp.planner.config import gigabits, nbytes
        from gradcomp.planner.probe import main

        specs = parse_specs(compressors)
        main(gigabits(link), out, specs, nbytes(largest, "largest"), step, device, make_console())
