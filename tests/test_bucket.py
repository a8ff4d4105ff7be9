"""Slots, blocks and compact runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.bucket import Parameter, ParameterTable, Runs, Scratch, Slot, cut_blocks

SIZES = st.lists(st.sampled_from([0, 1, 31, 32, 33, 100, 256, 1000]), min_size=1, max_size=6)


def slots_of(sizes: list[int], order: list[int]) -> tuple[list[Slot], ParameterTable]:
    table = ParameterTable([Parameter(f"p{i}", n, (n,), torch.float32) for i, n in enumerate(sizes)])
    slots, offset = [], 3  # a bucket may begin with something else
    for i in order:
        slots.append(Slot(f"p{i}", offset, sizes[i], (sizes[i],), (1,)))
        offset += sizes[i]
    return slots, table


@given(sizes=SIZES, world=st.integers(1, 5), block=st.sampled_from([32, 64, 256]), data=st.data())
def test_blocks_cover_every_element_once_and_shards_do_not_overlap(
    sizes: list[int], world: int, block: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    slots, table = slots_of(sizes, order)
    per_rank = [cut_blocks(slots, table, block, rank, world, torch.device("cpu")) for rank in range(world)]
    blocks, spans = per_rank[0]
    covered = torch.cat([torch.zeros(0, dtype=torch.int64)] + [
        torch.arange(s, s + n) for s, n in zip(blocks.start.tolist(), blocks.length.tolist(), strict=True)
    ])  # fmt: skip
    assert covered.tolist() == [i for slot in slots for i in range(slot.offset, slot.offset + slot.numel)]
    assert len(set(blocks.position.tolist())) == blocks.count
    for rank, (theirs, _) in enumerate(per_rank):
        assert torch.equal(theirs.position, blocks.position)
        mine = (blocks.position // max(1, blocks.per_shard) == rank).nonzero().flatten()
        lengths = torch.zeros(blocks.per_shard, dtype=torch.int32)
        lengths[blocks.position[mine] - rank * blocks.per_shard] = blocks.length[mine]
        assert torch.equal(theirs.owned, lengths)
    assert sum(span.count for span in spans) == blocks.count
    shares = torch.bincount(blocks.position // max(1, blocks.per_shard), minlength=world)
    if order == sorted(order):  # in declaration order the shares are as equal as can be
        assert int(shares.max() - shares.min()) <= 1


@given(sizes=SIZES, world=st.integers(1, 5), data=st.data())
def test_a_blocks_owner_does_not_depend_on_the_bucket(sizes: list[int], world: int, data: st.DataObject) -> None:
    owners = []
    for order in (list(range(len(sizes))), data.draw(st.permutations(range(len(sizes))))):
        slots, table = slots_of(sizes, order)
        blocks, spans = cut_blocks(slots, table, 32, 0, world, torch.device("cpu"))
        owner = blocks.position // max(1, blocks.per_shard)
        owners.append({s.name: owner[s.first : s.first + s.count].tolist() for s in spans})
    assert owners[0] == owners[1]


@given(sizes=st.lists(st.sampled_from([0, 1, 5, 20000, 16384]), min_size=1, max_size=5), chosen=st.data())
def test_runs_gather_and_scatter(sizes: list[int], chosen: st.DataObject) -> None:
    slots, _ = slots_of(sizes, list(range(len(sizes))))
    picked = [slot for slot in slots if chosen.draw(st.booleans())]
    flat = torch.randn(sum(sizes) + 3, generator=torch.Generator().manual_seed(0))
    runs = Runs(picked, torch.device("cpu"))
    expected = torch.cat([torch.zeros(0), *[flat[s.offset : s.offset + s.numel] for s in picked]])
    assert runs.numel == expected.numel()
    out = torch.zeros(runs.numel)
    runs.gather(flat, out)
    assert torch.equal(out, expected)
    target = torch.zeros_like(flat)
    runs.scatter(out, target)
    mask = torch.zeros_like(flat, dtype=torch.bool)
    for slot in picked:
        mask[slot.offset : slot.offset + slot.numel] = True
    assert torch.equal(target, torch.where(mask, flat, torch.zeros(())))
    view = runs.view(flat)
    assert view is None or torch.equal(view, expected)


@pytest.mark.parametrize(
    ("shape", "stride", "matrix"),
    [
        ((6, 4), (4, 1), (6, 4)),
        ((6, 4), (1, 6), (4, 6)),  # stored transposed
        ((8, 3, 2, 2), (12, 4, 2, 1), (8, 12)),
        ((8, 3, 2, 2), (12, 1, 6, 3), (8, 12)),  # channels_last
        ((1, 5, 7), (35, 7, 1), (5, 7)),
        ((7,), (1,), (1, 7)),
        ((), (), (1, 1)),
    ],
)
def test_matrix_of_a_slot(shape: tuple[int, ...], stride: tuple[int, ...], matrix: tuple[int, int]) -> None:
    assert Slot("p", 0, torch.Size(shape).numel(), shape, stride).matrix == matrix


def test_names_must_be_unique() -> None:
    twice = [Parameter("a", 1, (1,), torch.float32)] * 2
    with pytest.raises(ValueError, match="not unique"):
        ParameterTable(twice)


def test_exchanges_share_scratch_memory() -> None:
    scratch, device = Scratch(), torch.device("cpu")
    one = [scratch.take(numel, torch.float32, device) for numel in (100, 30)]
    scratch.begin()
    two = [scratch.take(20, torch.uint8, device), scratch.take(50, torch.float32, device)]
    assert one[0].data_ptr() == two[0].data_ptr() != one[1].data_ptr()
    assert [tensor.numel() for tensor in two] == [20, 50]
    two[1].fill_(1)  # larger than what was there: memory of its own
    assert float(one[1].sum()) == 0
