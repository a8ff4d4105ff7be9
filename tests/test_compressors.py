"""Every registered compressor keeps the contract, on every kernel backend; properties over shapes and values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradcomp
from gradcomp.compressors import base
from gradcomp.kernels.select import available
from gradcomp.testing import VirtualBucket, check_compressor

BACKENDS = [name for name, state in available().items() if state == "available"]
SPECS = [
    *gradcomp.compressor_names(),
    "fp16:accumulate=wire",
    "bf16:accumulate=wire",
    "int8:error_feedback=true",
    "int8:stochastic=true,block=64",
    "int4:error_feedback=false",
    "int4:stochastic=true",
    "onebit:block=32",
    "topk:ratio=0.05,values=fp16",
    "topk:select=exact,index=int32",
    "topk:k=7",
    "powersgd:rank=2,warm_start=false",
    "powersgd:error_feedback=false,rank=32",
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_contract(spec: str, backend: str) -> None:
    check_compressor(spec, backend)


IN_PIECES = ["fp16", "bf16", "int8", "int8:stochastic=true", "int4", "onebit", "onebit:error_feedback=false"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", IN_PIECES)
def test_contract_of_buckets_that_travel_in_pieces(spec: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_PIECE", 700)
    monkeypatch.setattr(base, "_MESSAGE_BYTES", 1)
    check_compressor(spec, backend)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("spec", IN_PIECES)
def test_pieces_change_no_bit(spec: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    results, states, calls = [], [], []
    gradients = [[torch.randn(30_000, generator=generator) for _ in range(world)] for _ in range(3)]
    for piece in (1 << 20, 3000):
        monkeypatch.setattr(base, "_PIECE", piece)
        monkeypatch.setattr(base, "_MESSAGE_BYTES", 1)
        bucket = VirtualBucket(spec, [(101, 63), (300,), (9, 1500)], world)
        gradients = [[gradient[: bucket.numel] for gradient in step] for step in gradients]
        results.append([torch.stack(bucket.step(step)) for step in gradients])
        states.append(bucket.state_dicts())
        calls.append(bucket.group.calls)
    assert calls[1] == 6 * calls[0] - 5  # the handshake is not cut
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    for one, other in zip(*states, strict=True):
        for kind in ("worker", "server"):
            assert one[kind].keys() == other[kind].keys()
            for name, value in one[kind].items():
                left, right = (v["values"] if isinstance(v, dict) else v for v in (value, other[kind][name]))
                assert torch.equal(left, right), (kind, name)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_a_warm_start_does_not_overflow(size: float) -> None:
    """P of a step is the gradient times the Q of the step before."""
    bucket = VirtualBucket("powersgd:rank=2", [(40, 50)], 2)
    matrix = torch.outer(torch.randn(40), torch.randn(50)).view(-1) * size
    for _ in range(3):
        result = bucket.step([matrix, matrix])[0]
    assert torch.allclose(result, matrix, rtol=1e-3, atol=1e-4 * size)


SCATTERING = [spec for spec in SPECS if gradcomp.parse_spec(spec)[0].traits.scatters and "wire" not in spec]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SCATTERING)
def test_contract_in_a_reduce_scatter(spec: str, backend: str) -> None:
    check_compressor(spec, backend, scatter=True)


@pytest.mark.parametrize("spec", ["topk", "powersgd", "fp16:accumulate=wire", "bf16:accumulate=wire"])
def test_what_does_not_fit_a_reduce_scatter_says_so(spec: str) -> None:
    compressor, config = gradcomp.parse_spec(spec)
    with pytest.raises(gradcomp.UnsupportedError, match=r"does not fit a reduce-scatter.*allowed"):
        compressor.check_scatter(config)


def test_a_reduce_scatter_sends_half_of_an_all_reduce() -> None:
    for spec in SCATTERING:
        sent = []
        for scatter in (False, True):
            bucket = VirtualBucket(spec, [(256, 512), (512, 256)], 4, scatter=scatter)
            for _ in range(2):
                before = bucket.group.bytes_sent
                bucket.step([torch.ones(bucket.numel)] * 4)
            sent.append(bucket.group.bytes_sent - before)
        assert 0.5 <= sent[1] / sent[0] < 0.51, (spec, sent)


def test_riders_of_a_reduce_scatter_keep_their_places() -> None:
    """Several compressors and uncompressed parameters in one bucket, padding in every row, half precision gradients."""
    shapes = [(33, 47), (5,), (70, 30), (11,), (40, 50)]
    rules = [("p0", "int8"), ("p2", "onebit"), ("p4", "fp16")]
    for dtype in (torch.float32, torch.bfloat16):
        bucket = VirtualBucket("int8", shapes, 3, rules=rules, scatter=True, dtype=dtype)
        gradients = [torch.randn(bucket.numel).sign().to(dtype) * (rank + 1) for rank in range(3)]
        mean = bucket.step(gradients)[0].float()
        true = torch.stack(gradients).float().mean(0)
        for slot in bucket.slots:
            here = slice(slot.offset, slot.offset + slot.numel)
            assert torch.allclose(mean[here], true[here], rtol=0.02), slot.name


@pytest.mark.parametrize("spec", ["onebit", "int8:error_feedback=true"])
def test_a_reduce_scatter_keeps_the_residual_in_another_world_size(spec: str) -> None:
    shapes = [(64, 65), (129, 31)]
    old = VirtualBucket(spec, shapes, 3, scatter=True)
    old.step([torch.randn(old.numel) for _ in range(3)])
    states, new = old.state_dicts(), VirtualBucket(spec, shapes, 2, scatter=True)
    for memory, share in zip(new.memories, (states[:2], states[2:]), strict=True):
        memory.load_state_dicts(share, exact=False)
    new.build([0, 1])
    assert torch.allclose(new.residual(), old.residual(), atol=1e-6)
    assert bool(old.residual().any())


@pytest.mark.parametrize(
    "spec", ["onebit:error_feedback=false", "topk:error_feedback=false", "powersgd:error_feedback=false"]
)
def test_without_feedback_nothing_is_remembered(spec: str) -> None:
    bucket = VirtualBucket(spec, [(64, 64), (64,)], 2)
    gradient = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(0))
    first = bucket.step([gradient, gradient])[0]
    assert all(memory.nbytes == 0 or not memory.state_dict()["worker"] for memory in bucket.memories)
    if "powersgd" not in spec:  # its warm start moves on
        assert torch.equal(first, bucket.step([gradient, gradient])[0])


@pytest.mark.parametrize("spec", [s for s in SPECS if s not in ("none", "topk:k=7")])
def test_the_result_does_not_depend_on_the_order_of_parameters_in_the_bucket(spec: str) -> None:
    shapes = [(40, 50), (40,), (33, 47), (2000,), (40, 50)]
    ours = VirtualBucket(spec, shapes, 2)
    theirs = VirtualBucket(spec, shapes, 2)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        if step == 3:
            theirs.build([4, 2, 0, 3, 1])
        by_name = [{slot.name: torch.randn(slot.numel, generator=generator) for slot in ours.slots} for _ in range(2)]
        results = []
        for bucket in (ours, theirs):
            flat = bucket.step([torch.cat([g[slot.name] for slot in bucket.slots]) for g in by_name])[0]
            results.append({s.name: flat[s.offset : s.offset + s.numel] for s in bucket.slots})
        for name in results[0]:
            assert torch.equal(results[0][name], results[1][name]), (step, name)


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "none"])
def test_the_result_does_not_depend_on_how_parameters_are_packed_into_buckets(spec: str) -> None:
    """One bucket of three parameters against one bucket each: same bits, over several steps."""
    shapes = [(300, 50), (96, 31), (200, 300)]
    together = VirtualBucket(spec, shapes, 2)
    apart = [VirtualBucket(spec, shapes, 2) for _ in shapes]
    for bucket, slot in zip(apart, together.slots, strict=True):
        bucket.build([int(slot.name[1:])])
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        ours = [torch.randn(together.numel, generator=generator) for _ in range(2)]
        result = together.step(ours)[0]
        for bucket, slot in zip(apart, together.slots, strict=True):
            here = slice(slot.offset, slot.offset + slot.numel)
            assert torch.equal(bucket.step([gradient[here] for gradient in ours])[0], result[here]), slot.name


@settings(max_examples=25)
@given(
    spec=st.sampled_from([s for s in SPECS if s != "none"]),
    sizes=st.lists(st.sampled_from([0, 1, 31, 32, 33, 255, 256, 257, 1500, 5000]), min_size=1, max_size=4),
    world=st.sampled_from([1, 2, 3, 4]),
    kind=st.sampled_from(["normal", "zeros", "tiny", "huge", "one spike", "integers"]),
    seed=st.integers(0, 2**31),
)
def test_any_sizes_and_values_are_conserved(spec: str, sizes: list[int], world: int, kind: str, seed: int) -> None:
    shapes = [(size // 50, 50) if size >= 1500 else (size,) for size in sizes]
    bucket = VirtualBucket(spec, shapes, world, rules=[("*", spec)])  # rules override the bypass of small ones
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        x = torch.randn(bucket.numel, generator=generator)
        if kind == "one spike" and bucket.numel:
            x = x * 0
            x[seed % bucket.numel] = 1e4
        scales = {"zeros": 0.0, "tiny": 1e-30, "huge": 1e30}
        return x.round() if kind == "integers" else x * scales.get(kind, 1.0)

    applied = torch.zeros(bucket.numel, dtype=torch.float64)
    true = torch.zeros(bucket.numel, dtype=torch.float64)
    for _ in range(3):
        ours = [draw() for _ in range(world)]
        results = bucket.step(ours)
        assert all(torch.equal(results[0], result) for result in results)
        if spec == "fp16:accumulate=wire" and kind == "huge":
            return  # fp16 sums of saturated values overflow
        assert bool(results[0].isfinite().all())
        applied += results[0]
        true += torch.stack(ours).double().mean(0)
    if bucket.exchanges[0].feeds_back:
        size = float(true.abs().max()) if bucket.numel else 0.0
        gap = applied + bucket.residual().double() - true
        assert not bucket.numel or float(gap.abs().max()) <= 2e-5 * max(size, float(applied.abs().max())) + 1e-35
    elif kind == "zeros":
        assert not bool(applied.any())


@pytest.mark.parametrize("spec", ["int8", "onebit", "topk", "fp16"])
def test_many_ranks(spec: str) -> None:
    """World sizes that no test machine has: same bits everywhere, mean of the right size."""
    world = 128
    bucket = VirtualBucket(spec, [(64, 64), (64,)], world)
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(bucket.numel, generator=generator)
    total = torch.zeros(bucket.numel)
    for _ in range(20):
        results = bucket.step([common + torch.randn(bucket.numel, generator=generator) for _ in range(world)])
        assert all(torch.equal(results[0], result) for result in results[1:])
        total += results[0]
    if spec != "topk":
        assert float((total / 20 - common).norm() / common.norm()) < 0.25


def test_thousand_ranks() -> None:
    bucket = VirtualBucket("int8", [(64, 32)], 1024)
    gradients = [torch.full((bucket.numel,), float(rank)) for rank in range(1024)]
    results = bucket.step(gradients)
    torch.testing.assert_close(results[0], torch.full((bucket.numel,), 511.5), rtol=0.01, atol=0)
    assert torch.equal(results[0], results[1023])


@pytest.mark.parametrize(("spec", "limit"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_casts_saturate_and_count(spec: str, limit: float) -> None:
    bucket = VirtualBucket(spec, [(4, 4)], 2)
    gradient = torch.zeros(16)
    gradient[3], gradient[5] = 3.4e38, -3.4e38
    result = bucket.step([gradient, torch.zeros(16)])[0]
    assert result[3] == limit / 2
    assert result[5] == -limit / 2
    assert int(bucket.exchanges[0].saturated) == 2
    gradient[3] = float("inf")
    result = bucket.step([gradient, torch.zeros(16)])[0]
    assert result[3] == float("inf")
    assert not bucket.exchanges[0].ok


def test_half_precision_sums_are_fp32_by_default() -> None:
    """A sum that fp16 cannot hold on the way: 64 ranks of 2048 + 1."""
    world = 64
    gradients = [torch.full((32,), 2048.0 if rank % 2 else 1.0) for rank in range(world)]
    bucket = VirtualBucket("fp16", [(32,)], world)
    assert torch.equal(bucket.step(gradients)[0], torch.full((32,), 1024.5).half().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", ["none", "int8", "onebit", "topk:ratio=0.1", "powersgd", "bf16"])
def test_gradient_dtypes(spec: str, dtype: torch.dtype) -> None:
    bucket = VirtualBucket(spec, [(64, 64), (64,)], 3, dtype=dtype)
    gradients = [torch.full((bucket.numel,), 0.5, dtype=dtype) for _ in range(3)]
    results = bucket.step(gradients)
    assert results[0].dtype == dtype
    assert all(torch.equal(results[0], result) for result in results)
    if spec != "topk:ratio=0.1":
        torch.testing.assert_close(results[0].float(), torch.full((bucket.numel,), 0.5), rtol=0.01, atol=0.001)


def test_rules_put_several_compressors_into_one_bucket() -> None:
    shapes = [(64, 64), (64,), (64, 64), (4000,)]
    bucket = VirtualBucket("onebit", shapes, 3, rules=[("p2", "int8"), ("p3", "topk:ratio=0.1")])
    generator = torch.Generator().manual_seed(0)
    applied, true = torch.zeros(bucket.numel), torch.zeros(bucket.numel)
    for _ in range(5):
        ours = [torch.randn(bucket.numel, generator=generator) for _ in range(3)]
        results = bucket.step(ours)
        assert all(torch.equal(results[0], result) for result in results)
        applied, true = applied + results[0], true + torch.stack(ours).mean(0)
    gap = (applied + bucket.residual() - true).abs()
    exact, lossless = bucket.slots[1], bucket.slots[2]
    assert gap[exact.offset : exact.offset + exact.numel].max() < 1e-5
    int8_gap = gap[lossless.offset : lossless.offset + lossless.numel]
    assert 0 < int8_gap.max() < 0.5  # int8 without feedback loses its rounding error
    gap[lossless.offset : lossless.offset + lossless.numel] = 0
    assert gap.max() < 1e-4


def test_switching_to_a_compressor_without_memory_sends_the_residual() -> None:
    bucket = VirtualBucket("onebit", [(64, 64)], 2)
    generator = torch.Generator().manual_seed(0)
    applied, true = torch.zeros(bucket.numel), torch.zeros(bucket.numel)
    for step in range(4):
        if step == 3:
            bucket.choices = gradcomp.rules.choose(bucket.parameters, "none", ())
            bucket.build([0])
        ours = [torch.randn(bucket.numel, generator=generator) for _ in range(2)]
        applied += bucket.step(ours)[0]
        true += torch.stack(ours).mean(0)
    torch.testing.assert_close(applied, true, rtol=0, atol=1e-5)
    assert not bucket.residual().any()


@pytest.mark.parametrize("spec", ["onebit", "int4", "topk", "powersgd"])
def test_residuals_of_parameters_that_no_rank_used_are_not_spent(spec: str) -> None:
    """DDP(find_unused_parameters=True) leaves such gradients alone, so what is sent for them would be lost."""
    bucket = VirtualBucket(spec, [(64, 64), (64, 64), (4000,)], 2, rules=[("*", spec)], find_unused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        bucket.step([torch.randn(bucket.numel, generator=generator) for _ in range(2)])
    before, slot = bucket.residual(), bucket.slots[1]
    here = slice(slot.offset, slot.offset + slot.numel)
    gradients = [torch.randn(bucket.numel, generator=generator) for _ in range(2)]
    for gradient in gradients:
        gradient[here] = 0
    bucket.step(gradients)
    assert torch.equal(bucket.residual()[here], before[here])
    gradients[1][here] = 1.0  # used on one rank: it is reduced, and spent
    bucket.step(gradients)
    assert not torch.equal(bucket.residual()[here], before[here])
