"""The payload format, version 1.

Every payload that gradcomp packs itself is a sequence of *shards* of equal size, one per destination rank. A shard is

====== ======= ===============================================================================================
offset bytes   field
====== ======= ===============================================================================================
0      1       format version (1)
1      1       flags: bit 0 = every gradient that this rank encoded is finite
2      2       world size, little-endian like all fields
4      4       CRC-32 of the canonical compressor spec
8      4       CRC-32 of the layout: names, offsets and sizes of the parameters in the bucket, block size, world size
12     4       step counter, modulo 2**32
16     48      zero
64     any     body, laid out by the compressor; sections start at multiples of 64, a cache line
====== ======= ===============================================================================================

Ranks compare all fields but the flags; a difference raises the same :class:`~gradcomp.errors.MismatchError` on every rank,
because every rank sees every header. The flags give consensus on inf and NaN without a collective of their own.

Payloads that are *summed* on the way (PowerSGD's all-reduces) cannot carry such bytes. They end in :data:`SUM_SLOTS`
floats: the number of ranks with a non-finite input, then the header's fingerprint in five 6-bit digits ``d`` as pairs
``d, d * d``. All ranks agree if and only if ``N * sum(d * d) == sum(d) ** 2`` for each digit (equality in Cauchy-Schwarz);
the sums are exact in fp32 up to 4227 ranks.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp.errors import MismatchError

VERSION = 1
HEADER_BYTES = 16
BODY = 64
_HEADER = struct.Struct("<BBHIII")
_FINITE = 1
_DIGITS = 5
SUM_SLOTS = 1 + 2 * _DIGITS
ALIGNMENT = 64
BYTE = torch.uint8


def align(nbytes: int) -> int:
    """Round up to the alignment of sections."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def checksum(*parts: object) -> int:
    """CRC-32 of the printed form of plain values (strings, numbers, tuples of them)."""
    return zlib.crc32(repr(parts).encode())


@dataclass(frozen=True, slots=True)
class Header:
    """What all ranks must agree on before a payload is read."""

    world: int
    spec: int
    layout: int
    step: int

    def pack(self, finite: bool) -> bytes:
        """The 16 bytes of the header."""
        return _HEADER.pack(
            VERSION, _FINITE if finite else 0, self.world, self.spec, self.layout, self.step & 0xFFFFFFFF
        )

    @property
    def fingerprint(self) -> int:
        """All fields in 30 bits."""
        return checksum(VERSION, self.world, self.spec, self.layout, self.step) & ((1 << 6 * _DIGITS) - 1)


def write_header(shards: Tensor, header: Header, finite: bool) -> None:
    """Write ``header`` in front of each row of ``shards``, uint8 [rows, S]."""
    packed = torch.frombuffer(bytearray(header.pack(finite)), dtype=torch.uint8)
    shards[:, :HEADER_BYTES] = packed.to(shards.device)


def check_headers(shards: Tensor, header: Header) -> bool:
    """Compare the headers of ``shards``, uint8 [W, S] with row r from rank r, with this rank's own.

    Returns whether the inputs of all ranks were finite.

    Raises:
        MismatchError: a rank sent another version, world size, compressor, layout or step.
    """
    raw = shards[:, :HEADER_BYTES].cpu().numpy().tobytes()
    mine = header.pack(True)
    finite = True
    for rank in range(shards.shape[0]):
        theirs = raw[rank * HEADER_BYTES : (rank + 1) * HEADER_BYTES]
        finite = finite and bool(theirs[1] & _FINITE)
        if theirs[:1] + theirs[2:] != mine[:1] + mine[2:]:
            raise MismatchError(_difference(raw))
    return finite


def _difference(raw: bytes) -> str:
    """Say which ranks differ in what; the same text on every rank."""
    rows = list(_HEADER.iter_unpack(raw))
    fields = {0: "format version", 2: "world size", 3: "compressor spec", 4: "bucket layout", 5: "step"}
    said = []
    for index, field in fields.items():
        groups: dict[int, list[int]] = {}
        for rank, row in enumerate(rows):
            groups.setdefault(row[index], []).append(rank)
        if len(groups) > 1:
            values = "; ".join(f"ranks {ranks}: {value:#x}" for value, ranks in sorted(groups.items()))
            said.append(f"{field} ({values})")
    return (
        "the ranks disagree on "
        + ", ".join(said)
        + ". All ranks must use the same gradcomp version, spec, rules and model, "
        "change them at the same step, and load checkpoints of the same step."
    )


def write_sum_slots(slots: Tensor, header: Header, finite: bool) -> None:
    """Fill ``slots``, fp32 [SUM_SLOTS], before a summing all-reduce."""
    values = [0.0 if finite else 1.0]
    for i in range(_DIGITS):
        digit = float(header.fingerprint >> (6 * i) & 63)
        values += [digit, digit * digit]
    slots.copy_(torch.tensor(values))


def check_sum_slots(slots: Tensor, header: Header) -> bool:
    """Check summed ``slots``, fp32 [SUM_SLOTS]; returns whether the inputs of all ranks were finite.

    Raises:
        MismatchError: as :func:`check_headers`; sums cannot tell which rank differs.
    """
    nonfinite, *pairs = (int(value) for value in slots.tolist())
    if any(header.world * squares != total * total for total, squares in zip(pairs[::2], pairs[1::2], strict=True)):
        raise MismatchError(
            "the ranks disagree on gradcomp version, world size, compressor spec, bucket layout or step. All ranks must use "
            "the same version, spec, rules and model, change them at the same step, and load checkpoints of the same step."
        )
    return nonfinite == 0
