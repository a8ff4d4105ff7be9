"""Residuals: keyed by name, committed or discarded as a whole, and never lost."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcomp import ConfigError
from gradcomp.memory import Memory
from gradcomp.testing import VirtualBucket

SHAPES = [(40, 50), (33, 47), (2000,), (64, 32)]


def trained(spec: str, world: int, steps: int = 3) -> VirtualBucket:
    bucket = VirtualBucket(spec, SHAPES, world, rules=[("*", spec)])
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        bucket.step([torch.randn(bucket.numel, generator=generator) for _ in range(world)])
    return bucket


def by_name(bucket: VirtualBucket) -> dict[str, torch.Tensor]:
    total = bucket.residual()
    return {slot.name: total[slot.offset : slot.offset + slot.numel] for slot in bucket.slots}


@pytest.mark.parametrize("spec", ["onebit", "int4", "topk", "powersgd", "onebit:block=64"])
@pytest.mark.parametrize("worlds", [(3, 2), (2, 3), (4, 1), (2, 2), (1, 4)])
def test_a_changed_world_size_keeps_the_total(spec: str, worlds: tuple[int, int]) -> None:
    before, after = (trained(spec, worlds[0]), VirtualBucket(spec, SHAPES, worlds[1], rules=[("*", spec)]))
    states = before.state_dicts()
    for rank, memory in enumerate(after.memories):
        memory.load_state_dicts(states[rank :: worlds[1]], exact=False)
    expected = by_name(before)
    for name, held in by_name(after).items():
        torch.testing.assert_close(held, expected[name], rtol=1e-5, atol=1e-6)
    after.build([3, 1, 0, 2])
    for name, held in by_name(after).items():
        torch.testing.assert_close(held, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "chain", [("onebit", "onebit:block=64", "topk", "int4", "onebit"), ("powersgd", "onebit", "topk")]
)
def test_another_compressor_or_block_size_keeps_the_total(chain: tuple[str, ...]) -> None:
    from gradcomp.rules import as_rules, choose

    bucket = trained(chain[0], 3)
    expected = by_name(bucket)
    for spec in chain[1:]:
        bucket.choices = choose(bucket.parameters, spec, as_rules([("*", spec)]))
        bucket.build([2, 0, 3, 1])
        for name, held in by_name(bucket).items():
            torch.testing.assert_close(held, expected[name], rtol=1e-5, atol=2e-6)


@given(order=st.permutations(range(len(SHAPES))))
def test_rebuilt_buckets_move_residuals_bit_for_bit(order: list[int]) -> None:
    bucket = trained("onebit", 2)
    before = bucket.state_dicts()
    bucket.build(order)
    for old, new in zip(before, bucket.state_dicts(), strict=True):
        for kind in ("worker", "server"):
            assert old[kind].keys() == new[kind].keys()
        assert all(torch.equal(old["worker"][name], new["worker"][name]) for name in old["worker"])
        assert all(torch.equal(old["server"][n]["values"], new["server"][n]["values"]) for n in old["server"])


def test_checkpoint_holds_tensors_and_plain_numbers_only() -> None:
    state = trained("onebit", 2).state_dicts()[1]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["rank"] == 1
    assert torch.equal(loaded["worker"]["p0"], state["worker"]["p0"])


def test_commit_discard_and_rollback() -> None:
    bucket = trained("onebit", 2)
    memory: Memory = bucket.memories[0]
    gradients = [torch.ones(bucket.numel)] * 2
    for rounds in (1, 2, 3, 2):
        before = memory.state_dict()["worker"]["p0"]
        memory.begin()
        for _ in range(rounds):
            bucket.step(gradients)
        assert not torch.equal(before, memory.state_dict()["worker"]["p0"])
        memory.rollback()
        assert torch.equal(memory.state_dict()["worker"]["p0"], before)
        memory.rollback()  # nothing is left to undo
        assert torch.equal(memory.state_dict()["worker"]["p0"], before)
        memory.begin()
        bucket.step(gradients)  # and this one stays
        memory.begin()
        memory.rollback()
        assert not torch.equal(before, memory.state_dict()["worker"]["p0"])


def test_a_rollback_reaches_back_over_a_change_of_layout() -> None:
    bucket = trained("onebit", 2)
    memory: Memory = bucket.memories[0]
    before = memory.state_dict()
    for one in bucket.memories:
        one.begin()
    bucket.step([torch.ones(bucket.numel)] * 2)
    bucket.build([1, 0, *range(2, len(bucket.parameters))])
    bucket.step([torch.ones(bucket.numel)] * 2)
    memory.rollback()
    for name, values in before["worker"].items():
        assert torch.equal(memory.state_dict()["worker"][name], values), name


def test_memory_is_reported_with_both_buffers() -> None:
    bucket = trained("onebit", 2)
    padded = sum(-(-slot.numel // 256) * 256 for slot in bucket.slots)
    assert bucket.memories[0].nbytes >= 8 * padded * 1.5
    assert trained("int8", 2).memories[0].nbytes == 0


@pytest.mark.parametrize("change", ["unknown", "resized"])
def test_a_foreign_state_is_refused(change: str) -> None:
    bucket = trained("topk", 2)
    state = bucket.memories[0].state_dict()
    worker = dict(state["worker"])
    if change == "unknown":
        worker["elsewhere"] = torch.zeros(3)
    else:
        worker["p0"] = torch.zeros(3)
    with pytest.raises(ConfigError, match="does not fit this model") as raised:
        bucket.memories[0].check({**state, "worker": worker})
    assert ("elsewhere" if change == "unknown" else "p0") in str(raised.value)
