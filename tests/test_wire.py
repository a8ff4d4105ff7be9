"""The payload format: golden bytes, and agreement that fails alike on every rank."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcomp import MismatchError, wire
from gradcomp.collectives import AllGather, AllToAll
from gradcomp.schedule import Exchange
from gradcomp.testing import VirtualBucket

HEADER = wire.Header(world=3, spec=0x11223344, layout=0xAABBCCDD, step=258)


def test_golden_header() -> None:
    assert HEADER.pack(True).hex() == "01010300443322 11ddccbbaa02010000".replace(" ", "")
    assert HEADER.pack(False).hex() == "0100030044332211ddccbbaa02010000"
    assert wire.VERSION == 1


def after_handshake(exchange: Exchange) -> AllToAll:
    """The request that carries the first payload, as if all ranks had agreed."""
    handshake = next(exchange)
    assert isinstance(handshake, AllGather)
    handshake.recv.view(-1, 16).copy_(handshake.send)
    request = next(exchange)
    assert isinstance(request, AllToAll)
    return request


def test_golden_onebit_payload() -> None:
    """64 elements, 2 ranks, block 32: header, exact section (empty), codes, scales."""
    bucket = VirtualBucket("onebit:block=32", [(8, 8)], 2, rules=[("*", "onebit:block=32")])
    exchange = bucket.exchanges[0].run(torch.tensor([1.0, -3.0] * 32), 5, 1.0)
    request = after_handshake(exchange)
    shards = request.send.view(2, -1)
    assert shards.shape == (2, 192)
    body = "55555555" + "00" * 60 + "00000040" + "00" * 60  # sign bits +-+-..., mean |v| = 2.0
    assert shards[0, 64:].numpy().tobytes().hex() == body
    assert shards[1, 64:].numpy().tobytes().hex() == body
    assert shards[0, :4].tolist() == [1, 1, 2, 0]
    assert shards[0, 12:16].tolist() == [5, 0, 0, 0]


def test_golden_int8_and_int4_payload() -> None:
    values = torch.zeros(32)
    values[:4] = torch.tensor([127.0, -127.0, 1.0, -64.0])
    for spec, codes in (("int8:block=32", "7f8101c0"), ("int4:block=32", "07090 00c".replace(" ", ""))):
        bucket = VirtualBucket(spec, [(4, 8)], 1, rules=[("*", spec)])
        exchange = bucket.exchanges[0].run(values.clone(), 0, 1.0)
        body = after_handshake(exchange).send[64:].numpy().tobytes()
        assert body[:4].hex() == codes
        scale = torch.frombuffer(bytearray(body[64:68]), dtype=torch.float32)
        assert scale == torch.tensor(127.0) / (127 if "int8" in spec else 7)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"world": 4}, "world size"),
        ({"spec": 1}, "compressor spec"),
        ({"layout": 1}, "bucket layout"),
        ({"step": 1}, "step"),
    ],
)
def test_every_field_is_compared_and_all_ranks_say_the_same(change: dict[str, int], word: str) -> None:
    other = dataclasses.replace(HEADER, **change)
    shards = torch.zeros(3, 16, dtype=torch.uint8)
    wire.write_header(shards, HEADER, True)
    wire.write_header(shards[1:2], other, True)
    said = []
    for mine in (HEADER, other):
        with pytest.raises(MismatchError, match=word) as raised:
            wire.check_headers(shards, mine)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "ranks [1]" in said[0]


def test_another_format_version_is_refused() -> None:
    shards = torch.zeros(2, 16, dtype=torch.uint8)
    header = dataclasses.replace(HEADER, world=2)
    wire.write_header(shards, header, True)
    shards[1, 0] = 2
    with pytest.raises(MismatchError, match="format version"):
        wire.check_headers(shards, header)


def test_one_nonfinite_rank_is_seen_by_all() -> None:
    shards = torch.zeros(3, 16, dtype=torch.uint8)
    wire.write_header(shards, HEADER, True)
    assert wire.check_headers(shards, HEADER)
    wire.write_header(shards[2:3], HEADER, False)
    assert not wire.check_headers(shards, HEADER)


@given(world=st.integers(1, 4227), finite=st.lists(st.booleans(), min_size=1, max_size=5))
def test_sum_slots_agree_exactly_up_to_thousands_of_ranks(world: int, finite: list[bool]) -> None:
    header = dataclasses.replace(HEADER, world=world)
    slots = torch.zeros(wire.SUM_SLOTS)
    wire.write_sum_slots(slots, header, True)
    total = slots * world
    total[0] = finite.count(False)
    assert wire.check_sum_slots(total, header) == all(finite)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=6))
def test_sum_slots_tell_differing_ranks(layouts: list[int]) -> None:
    total = torch.zeros(wire.SUM_SLOTS)
    headers = [dataclasses.replace(HEADER, world=len(layouts), layout=layout) for layout in layouts]
    for header in headers:
        slots = torch.zeros(wire.SUM_SLOTS)
        wire.write_sum_slots(slots, header, True)
        total += slots
    if len({header.fingerprint for header in headers}) == 1:
        assert wire.check_sum_slots(total, headers[0])
    else:
        for header in headers:
            with pytest.raises(MismatchError):
                wire.check_sum_slots(total, header)
