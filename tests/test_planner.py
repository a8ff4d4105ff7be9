"""The planner: formulas against published figures, the event model, decisions, the command, and what it prints to paste."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradcomp
from gradcomp import ConfigError
from gradcomp.planner import (
    Job,
    Model,
    Profile,
    assumed_network,
    from_config,
    from_parameters,
    memory,
    payload,
    plan,
    predict,
    timing,
    transformer,
    volume,
)
from gradcomp.planner.decide import accuracy_of, choose, risk
from gradcomp.planner.model import Tensor
from gradcomp.planner.profile import Codec, Curve, Network, assumed_codec, framing

N7 = 7e9
# 7e9 parameters without vocabulary or norms, in whole blocks: all of it is compressed, as in the table of formulas
MATRICES = Model(tuple((Tensor(f"{i}", (8192, 8192)),) for i in range(104)), wanted=N7, title="7B in matrices")
LINE = Network(gigabits=10.0, efficiency=1.0, latency=0.0)
GOODPUT = Network(gigabits=10.0, efficiency=0.85, latency=0.0)


def job(**changes: Any) -> Job:
    return replace(Job(model=MATRICES, gpus=8, network=LINE), **changes)


# ------------------------------------------------------------------------ volumes
def table_row(scheme: str, spec: str = "none", **changes: Any) -> tuple[float, float, float]:
    """GB sent, seconds at the line's rate, seconds at 85 % of it."""
    row = predict(job(overlap=False, **changes), scheme, spec)
    slow = predict(job(overlap=False, network=GOODPUT, **changes), scheme, spec)
    return row.bytes_per_rank / 1e9, row.comm_seconds, slow.comm_seconds


SEVEN_BILLION = [  # 7e9 parameters, 8 single-GPU nodes, 10 Gb/s, one micro-step
    ("DDP fp32", ("ddp", "none"), {"precision": "fp32"}, ("49.0", "39.2", "46.1")),
    ("DDP bf16", ("ddp", "none"), {}, ("24.5", "19.6", "23.1")),
    ("ZeRO-1 bf16", ("zero1-paper", "none"), {}, ("24.5", "19.6", "23.1")),
    ("ZeRO-2 bf16", ("zero2-paper", "none"), {}, ("24.5", "19.6", "23.1")),
    ("ZeRO-3 bf16", ("zero3", "none"), {}, ("36.75", "29.4", "34.6")),
    ("ZeRO++ without hpZ", ("zero++", "none"), {}, ("15.3", "12.2", "14.4")),
    ("int8, block 128", ("ddp", "int8:block=128"), {}, ("12.6", "10.1", "11.9")),
    ("int4, a scale of 32 bits per 256 = 16 per 128", ("ddp", "int4:block=256"), {}, ("6.3", "5.1", "5.9")),
    ("Top-K 1 %, fp32 + int32", ("ddp", "topk:index=int32"), {}, ("3.9", "3.1", "3.7")),
    ("1 bit", ("ddp", "onebit:block=65536"), {}, ("1.5", "1.2", "1.4")),
    ("DiLoCo fp32, H = 100", ("diloco", "none"), {"precision": "fp32"}, (".49", ".39", ".46")),
]


@pytest.mark.parametrize(
    ("scheme", "changes", "expected"), [row[1:] for row in SEVEN_BILLION], ids=[r[0] for r in SEVEN_BILLION]
)
def test_the_table_of_seven_billion_parameters(
    scheme: tuple[str, str], changes: dict[str, Any], expected: tuple[str, ...]
) -> None:
    for value, text in zip(table_row(*scheme, **changes), expected, strict=True):
        digits = len(text.partition(".")[2])
        assert abs(value - float(text)) <= 0.5001 * 10.0**-digits, (value, text)


def test_scale_sections_and_headers_are_in_the_bytes() -> None:
    pure = volume.all_reduce(N7 / 8, 8)
    default = predict(job(), "ddp", "onebit").bytes_per_rank  # block 256: 32/256 of a bit more
    assert default == pytest.approx(pure * (1 + 32 / 256), rel=1e-3)
    assert default > pure * (1 + 32 / 256)


ROUNDS = [
    (1, "ddp", 2), (4, "ddp", 2), (4, "zero1-paper", 2), (4, "zero2-paper", 5), (4, "zero3", 12), (4, "fsdp2-keep", 8),
    (4, "zero2", 9), (4, "zero1", 3),
]  # fmt: skip


@pytest.mark.parametrize(("micro", "scheme", "rounds"), ROUNDS)
def test_micro_steps(micro: int, scheme: str, rounds: int) -> None:
    row = predict(job(accumulation=micro), scheme, "none")
    assert row.bytes_per_rank == pytest.approx(rounds * volume.share(8) * 2 * N7, rel=1e-6)
    assert volume.SCHEMES[scheme].plain_bytes(N7, 8, 2, 2, micro) == pytest.approx(row.bytes_per_rank, rel=1e-6)


def test_zero_plus_plus_and_local_steps() -> None:
    assert volume.zero_plus_plus(N7, 8) == pytest.approx(0.875 * 2.5 * N7)
    assert volume.zero_plus_plus(N7, 8, gpus_per_node=4) == pytest.approx(0.875 * 1.5 * N7)
    assert volume.local_steps(N7, 8, 4, 100) == pytest.approx(0.49e9)


def test_top_k_grows_with_the_ranks() -> None:
    """50, 12.5 and 1.6 times fewer bytes than a dense fp32 ring at 2, 8 and 64 ranks for 8-byte entries of 1 %."""
    shape = [gradcomp.bucket.Parameter("p", 2000 * 2000, (2000, 2000), torch.float32)]
    for ranks, ratio in ((2, 50), (8, 12.5), (64, 1.6)):
        sent = payload.dry_run(shape, "topk:index=int32", ranks).nbytes
        assert volume.all_reduce(4 * 2000 * 2000, ranks) / sent == pytest.approx(ratio, rel=0.03)


def test_nic_of_several_gpus() -> None:
    n, g = 16, 4
    sent = volume.scatter(1.0, n)
    assert volume.nic_bytes("AllReduce", sent, n, g) == sent
    assert volume.nic_bytes("AllToAll", sent, n, g) == pytest.approx(g * (n - g) / n)
    assert volume.hierarchical_nic_bytes(8.0, 4.0, 2) == 2 / 2 * 8 / 4


# ------------------------------------------------------------------------ memory
FIGURE_1 = [
    ((), "120"),
    (("optimizer",), "31.4"),
    (("optimizer", "gradients"), "16.6"),
    (("optimizer", "gradients", "weights"), "1.9"),
]


@pytest.mark.parametrize(("sharded", "expected"), FIGURE_1)
def test_model_states_are_those_of_the_zero_paper(sharded: tuple[str, ...], expected: str) -> None:
    found = memory.model_states(7.5e9, 64, "bf16", "adam", sharded).gpu / 1e9
    digits = len(expected.partition(".")[2])
    assert f"{found:.{digits}f}" == expected


def test_optimizer_states() -> None:
    assert memory.optimizer_bytes("adam", "bf16") == 12
    assert memory.optimizer_bytes("adam", "fp32") == 8
    assert memory.optimizer_bytes("sgd", "bf16") == 8
    assert 6 < memory.optimizer_bytes("adam8bit", "bf16") < 6.01
    offloaded = memory.model_states(1e9, 4, "bf16", "adam", ("optimizer", "gradients"), offload=True)
    assert (offloaded.gpu, offloaded.host) == (2e9, 12e9 / 4 + 2e9 / 4)


def test_activations_follow_the_paper() -> None:
    """GPT-3's layer (h = 12288, 96 heads, s = 2048, b = 1): s b h (34 + 5 a s / h) = 2.86 GB, 0.86 GB with flash attention."""
    shape = {
        "layers": 1,
        "hidden": 12288,
        "heads": 96,
        "vocabulary": 0,
        "batch": 1,
        "sequence": 2048,
        "checkpointing": False,
    }
    assert memory.activations(**shape, flash=False) == pytest.approx(2048 * 12288 * (34 + 80))
    assert memory.activations(**shape) == pytest.approx(2048 * 12288 * 34)
    many = {**shape, "layers": 96}
    assert memory.activations(**{**many, "checkpointing": True}) < memory.activations(**many) / 8


def test_residuals_and_scratch_are_those_of_real_buffers() -> None:
    from gradcomp.bucket import Parameter, ParameterTable
    from gradcomp.engine import BucketExchange, Context
    from gradcomp.kernels.select import get_ops
    from gradcomp.memory import Memory
    from gradcomp.rules import choose as choose_specs

    parameters = [Parameter("a", 300 * 200, (300, 200), torch.float32), Parameter("b", 300, (300,), torch.float32)]
    for spec in gradcomp.compressor_names():
        found = payload.dry_run(parameters, spec, 3)
        held = Memory(ParameterTable(parameters), 0, 3)
        context = Context(held.table, held, 0, 3, get_ops(torch.device("cpu"), "auto"))
        exchange = BucketExchange(
            payload.slots_of(parameters), torch.zeros(60300), choose_specs(parameters, spec, ()), context
        )
        assert found.residual == held.nbytes
        if spec == "int8":
            (part,) = exchange._parts[0].payloads  # type: ignore[attr-defined]
            buffers = part.send.nbytes + part.recv.nbytes + part.mine.nbytes
            assert buffers <= found.scratch <= buffers + 4096
            assert 0 < found.tables < 40 * (60300 // 256 + 2)


def test_large_buckets_travel_in_pieces_and_the_time_model_lets_them_overlap() -> None:
    from gradcomp.bucket import Parameter

    bucket = payload.dry_run([Parameter("a", 2048 * 2048, (2048, 2048), torch.float32)], "int8", 2)
    assert [len(phase) for phase in bucket.phases] == [4, 4]
    whole = replace(
        bucket, requests=tuple(payload.Request(p[0].kind, sum(r.nbytes for r in p), p[-1].final) for p in bucket.phases)
    )
    network, codec = Network(gigabits=10.0, efficiency=1.0, latency=0.0), assumed_codec("int8", "cpu")
    pieces, one = (timing.backward([b], 0.0, network, codec, 2) for b in (bucket, whole))
    assert pieces.codec == pytest.approx(one.codec)
    assert pieces.link == pytest.approx(one.link)
    # at best the longer of both, at worst their sum
    assert max(one.codec, one.link) <= pieces.total < 0.8 * one.total
    assert one.total == pytest.approx(one.codec + one.link)


# ------------------------------------------------------------------------ time
def test_a_curve_fits_latency_and_bandwidth() -> None:
    points = [(x, 1e-3 + x / 100e6) for x in (4e3, 4e5, 4e7)]
    curve = Curve.fit(points)
    assert curve.fixed == pytest.approx(1e-3, rel=1e-6)
    assert 1 / curve.per_byte == pytest.approx(100e6, rel=1e-6)
    assert curve.residual < 1e-9
    for x in (1e5, 3e6, 9e7):
        assert curve.seconds(x) == pytest.approx(1e-3 + x / 100e6, rel=1e-6)
    assert Curve.fit([(1e3, 1.0), (1e4, 1.0), (1e5, 4.0)]).residual > 0.1
    with pytest.raises(ConfigError, match="two sizes"):
        Curve.fit([(1.0, 1.0)])


def test_starting_a_collective_occupies_the_host() -> None:
    curves = {"AllReduce": Curve.fit([(x, 1e-4 + x / 1e9) for x in (4e3, 4e6)], issue=5e-3)}
    network = Network(gigabits=8.0, efficiency=1.0, latency=0.0, curves=curves, measured_ranks=2)
    buckets = [bucket(1e6) for _ in range(4)]
    hidden = timing.backward(buckets, 1.0, network, None, 2)
    free = timing.backward(
        buckets, 1.0, replace(network, curves={"AllReduce": replace(curves["AllReduce"], issue=0.0)}), None, 2
    )
    assert hidden.total - free.total == pytest.approx(4 * 5e-3, rel=0.3)


def test_pieces_under_way_together_have_one_measured_latency() -> None:
    pieces = [payload.Request("AllToAll", 1e6, False, ahead=True) for _ in range(4)]
    many = payload.Bucket(numel=1e6, compressed=1e6, requests=(*pieces, payload.Request("AllGather", 1e6, True)))
    line = Curve.fit([(x, 1e-2 + x / 1e9) for x in (4e3, 4e7)])
    assumed = Network(gigabits=8.0, efficiency=1.0, latency=1e-2)
    measured = replace(assumed, curves={"AllToAll": line, "AllGather": line}, measured_ranks=2)
    links = [timing.backward([many], 0.0, network, None, 2).link for network in (assumed, measured)]
    assert links == pytest.approx([5 * (1e-2 + 1e-3), 2 * 1e-2 + 5e-3], rel=1e-3)


def test_short_messages_that_pass_at_once_do_not_bend_the_line() -> None:
    """A token bucket lets 64 kB through; what is larger takes its time."""
    points = [(x, 5e-4 + max(0.0, x - 65536) / 12.5e6) for x in (4096.0 * 4**k for k in range(6))]
    curve = Curve.fit(points)
    assert 1 / curve.per_byte == pytest.approx(12.5e6, rel=0.01)
    assert curve.fixed == pytest.approx(5e-4, rel=0.01)
    assert curve.seconds(42e6) == pytest.approx(42e6 / 12.5e6, rel=0.01)
    assert curve.residual > 1
    assert 1 / Curve.fit([(1e3, 1.0), (1e4, 0.9)]).per_byte == pytest.approx(1e4 / 0.9)  # noise, not a negative time


def bucket(nbytes: float, phases: int = 1, numel: float = 1e6) -> payload.Bucket:
    kinds = ["AllReduce"] if phases == 1 else ["AllToAll", "AllGather"]
    requests = [payload.Request(kind, nbytes / phases, i == phases - 1) for i, kind in enumerate(kinds)]
    return payload.Bucket(numel, numel, tuple(requests))


def test_overlap_by_bucket() -> None:
    """Four buckets of 1 s each on the link, backward of 4 s: all but the last are hidden."""
    net = Network(gigabits=8e-9, efficiency=1.0, latency=0.0)  # one byte per second
    buckets = [bucket(1.0)] * 4
    hidden = timing.backward(buckets, 4.0, net, None, 2)
    assert (hidden.total, hidden.link, hidden.exposed) == pytest.approx((5.0, 4.0, 1.0))
    alone = timing.backward(buckets, 4.0, net, None, 2, overlap=False)
    assert alone.total == pytest.approx(8.0)
    inline = timing.backward(buckets, 4.0, net, None, 2, "inline")
    assert inline.total == pytest.approx(8.0)
    link_bound = timing.backward(buckets, 0.4, net, None, 2)
    assert link_bound.total == pytest.approx(0.1 + 4.0)


def test_codecs_occupy_the_host_and_phases_pipeline() -> None:
    net = Network(gigabits=8e-9, efficiency=1.0, latency=0.0)
    codec = Codec(((0.1, 0.0), (0.1, 0.0), (0.1, 0.0)), "test")
    buckets = [bucket(1.0, phases=2)] * 3
    step = timing.backward(buckets, 3.0, net, codec, 2)
    assert step.codec == pytest.approx(0.9)
    assert step.link == pytest.approx(3.0)
    assert 3.9 <= step.total < timing.backward(buckets, 3.0, net, codec, 2, "inline").total
    assert timing.backward(buckets, 3.0, net, codec, 2, "inline").total == pytest.approx(3 + 0.9 + 3)


def test_sharded_steps_prefetch() -> None:
    net = Network(gigabits=8e-9, efficiency=1.0, latency=0.0)
    units = [(1.0, payload.Bucket(1.0, 0, (payload.Request("ReduceScatter", 0.5, True),)))] * 4
    in_turn = timing.sharded_micro_step(units, 4.0, 8.0, 1.0, net, None, 2, overlap=False)
    assert in_turn.total == pytest.approx(12 + 8 * 0.5 + 4 * 0.5)
    ahead = timing.sharded_micro_step(units, 4.0, 8.0, 1.0, net, None, 2)
    assert ahead.total == pytest.approx(12 + 0.5 + 0.5 + 0.5)  # the first gather of each pass, the last reduce-scatter
    assert ahead.link == pytest.approx(in_turn.link)
    coded = Codec(((0.0, 0.0), (0.0, 0.1)), "test")
    decoding = timing.sharded_micro_step(units, 4.0, 8.0, 1.0, net, None, 2, gather_codec=coded, overlap=False)
    assert decoding.total == pytest.approx(in_turn.total + 8 * 0.1)
    kept = timing.sharded_micro_step(units, 4.0, 8.0, 1.0, net, None, 2, gathers=1, overlap=False)
    assert kept.total == pytest.approx(in_turn.total - 4 * 0.5)


def test_frames() -> None:
    assert framing(1500, rdma=False) == pytest.approx(1448 / 1538)
    assert assumed_network(10.0).efficiency == pytest.approx(0.85)
    assert 0.85 < assumed_network(10.0, mtu=9000).efficiency < assumed_network(10.0, mtu=9000, rdma=True).efficiency
    assert assumed_network(10.0, rdma=True).latency < assumed_network(10.0).latency


def test_more_bandwidth_is_never_slower() -> None:
    for spec in ("none", "int8", "topk", "powersgd"):
        for scheme in ("ddp", "zero2"):
            times = [predict(job(network=assumed_network(g)), scheme, spec).step_seconds for g in (1, 10, 100)]
            assert times == sorted(times, reverse=True)


# ------------------------------------------------------------------------ decisions
def test_it_says_do_not_compress() -> None:
    made = plan(job(model=from_parameters(2e8), network=assumed_network(100.0), compute_seconds=2.0))
    assert made.best is not None
    assert made.best.compressor == "none"
    assert made.advice[0].startswith("Do not compress")


def test_it_says_that_more_machines_do_not_help() -> None:
    made = plan(
        job(model=from_parameters(1e9), network=assumed_network(1.0), compressors=("none", "topk"), schemes=("ddp",))
    )
    assert any("More machines will not help" in line for line in made.advice)
    assert any("one GPU alone would be faster" in line for line in made.advice)


def test_one_gpu() -> None:
    made = plan(job(model=from_parameters(1e9), gpus=1))
    assert "nothing to compress" in made.advice[0]
    assert all(row.bytes_per_rank == 0 for row in made.rows if row.scheme != "zero++")


def test_memory_decides() -> None:
    tight = plan(job(model=from_parameters(7e9), network=assumed_network(10.0), gpu_memory=24e9))
    assert tight.best is not None
    assert tight.best.scheme in ("zero3", "fsdp2", "fsdp2-int8")
    ddp = next(row for row in tight.rows if row.scheme == "ddp")
    assert ddp.fits is False
    assert "does not fit" in ddp.why
    assert tight.best.compressor not in ("onebit", "int4")  # without error feedback at stage 3
    asked = predict(job(model=from_parameters(7e9)), "zero3", "int4:error_feedback=true")
    assert asked.available
    assert asked.memory["gradcomp residuals"] == pytest.approx(8 * 7e9, rel=0.1)
    nothing = plan(job(model=from_parameters(7e9), gpu_memory=1e9))
    assert nothing.best is None
    assert "Nothing fits in 1 GB" in nothing.advice[0]


def test_within_the_margin_the_harmless_choice_wins() -> None:
    rows = [predict(job(), "ddp", spec) for spec in ("none", "int8", "onebit")]
    times = [replace(row, step_seconds=t) for row, t in zip(rows, (1.025, 1.02, 1.0), strict=True)]
    chosen = choose(times)
    assert chosen is not None
    assert chosen.compressor == "none"
    faster = choose([replace(times[0], step_seconds=1.2), *times[1:]])
    assert faster is not None
    assert faster.compressor == "int8"
    assert [risk(spec) for spec in ("none", "fp16", "int8", "powersgd", "topk")] == [0, 1, 2, 3, 4]


def test_safe_recommends_no_biased_compressor() -> None:
    made = plan(job(model=from_parameters(1e9), network=assumed_network(1.0), safe=True, schemes=("ddp",)))
    assert made.best is not None
    assert made.best.compressor == "int8"


def test_break_even_is_where_the_times_cross() -> None:
    base = job(model=from_parameters(3e8), network=assumed_network(10.0), device="cpu", backend="gloo", precision="fp32",
               compute_seconds=1.0, schemes=("ddp",), compressors=("none", "int8"))  # fmt: skip
    speed = plan(base).break_even["int8"]
    assert speed is not None
    for gigabits, wins in ((0.8 * speed, True), (1.25 * speed, False)):
        there = replace(base, network=assumed_network(gigabits))
        times = [predict(there, "ddp", spec).step_seconds for spec in ("int8", "none")]
        assert (times[0] < times[1]) is wins


def test_third_party_compressors_are_planned() -> None:
    pytest.importorskip("numba")
    assert assumed_codec("int8:block=64", "cpu").segments == assumed_codec("int8", "cpu").segments
    assert len(assumed_codec("topk", "cuda").segments) == 2


def test_accuracy_warnings_come_from_the_benchmark() -> None:
    said = accuracy_of("topk", "adam")
    assert said is None or "%" in said


# ------------------------------------------------------------------------ models
@pytest.mark.parametrize("count", [4e5, 1e8, 1e9, 7e9, 1.3e10, 7e10])
def test_a_count_of_parameters_is_met_exactly(count: float) -> None:
    model = from_parameters(count)
    assert model.numel == count
    assert 0.9 < model.scale < 1.12


def test_llama_configs() -> None:
    seven = from_config({
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000,
    })  # fmt: skip
    assert seven.numel == 6_738_415_616  # LLaMA 7B's own count
    grouped = transformer(layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=28672)
    assert grouped.numel == 68_976_648_192  # Llama 2 70B's
    with pytest.raises(ConfigError, match="hidden_size"):
        from_config({"num_hidden_layers": 2})


def test_modules_have_shapes() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(50, 8), "layers": layers})
    model = Model.of(module)
    assert model.numel == 400 + 3 * 72
    assert len(model.units) == 4
    assert model.units[0][0].embedding


def test_buckets_are_those_of_ddp() -> None:
    parameters = from_parameters(3e7).parameters(torch.float32)
    buckets = payload.ddp_buckets(parameters)
    assert [p.name for p in buckets[0]] == [parameters[-1].name]  # the first bucket closes at 1 MB
    assert sorted(p.name for b in buckets for p in b) == sorted(p.name for p in parameters)
    zero = payload.deepspeed_buckets(parameters, 3_000_000)
    assert all(sum(p.numel for p in b) <= 3_000_000 for b in zero)


def test_a_large_model_takes_seconds() -> None:
    made = plan(Job(model=from_parameters(7e10), gpus=64, network=assumed_network(25.0), schemes=("ddp", "zero3")))
    assert made.best is not None
    ddp = next(row for row in made.rows if (row.scheme, row.compressor) == ("ddp", "none"))
    assert ddp.bytes_per_rank == pytest.approx(2 * 63 / 64 * 2 * 7e10, rel=1e-6)


# ------------------------------------------------------------------------ profiles
def make_profile(**changes: Any) -> Profile:
    curves = {
        kind: Curve.fit([(1e4, 1e-3), (1e6, 1.1e-2), (1e7, 0.101)]) for kind in ("AllReduce", "AllToAll", "AllGather")
    }
    codecs = {"int8": Codec(((1e-4, 1e-9), (1e-4, 1e-9), (1e-4, 1e-9)), "measured")}
    return replace(
        Profile(ranks=2, backend="gloo", device="cpu", gigabits=1.0, collectives=curves, codecs=codecs), **changes
    )


def test_profiles_survive_a_file(tmp_path: Path) -> None:
    made = make_profile(compute={"forward": 0.1, "backward": 0.2, "optimizer": 0.01})
    made.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == made
    network = made.network()
    assert network.seconds("AllReduce", 1e6, 2) == pytest.approx(1.1e-2)
    assert network.seconds("AllReduce", 1e6, 3) > network.seconds("AllReduce", 1e6, 2)
    assert network.at(0.1).seconds("AllReduce", 1e7, 2) > 5 * network.seconds("AllReduce", 1e7, 2)
    planned = replace(
        job(), model=from_parameters(1e7), gpus=2, profile=made, network=network, device="cpu", backend="gloo"
    )
    row = predict(planned, "ddp", "int8")
    assert row.compute_seconds == pytest.approx(0.31)
    assert row.codec_seconds > 3e-9 * 1e7
    assert made.codec("int8:block=64") == made.codecs["int8"]
    assert made.codec("topk") == assumed_codec("topk", "cpu")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 9}', '{"format": 1, "ranks": 2}'])
def test_broken_profiles(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="gradcomp probe"):
        Profile.load(path)


def test_infinite_break_even_is_valid_json() -> None:
    from gradcomp.planner import report

    made = plan(job(model=from_parameters(1e8), compressors=("none", "int8"), schemes=("ddp",)))
    made.break_even["int8"] = math.inf
    json.dumps(report.as_json(made), allow_nan=False)
