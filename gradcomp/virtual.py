"""N virtual ranks in one process: drives N compressor generators without any process group.

Used by unit and property tests, and to study compressors at world sizes (up to 1024) that no test machine has.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from gradcomp.collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter, Wait
from gradcomp.errors import MismatchError


class VirtualGroup:
    """Runs ``world`` exchanges in lockstep and counts the bytes that each rank would send."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.bytes_sent = 0
        self.calls = 0

    def run(self, exchanges: Sequence[Generator[Collective | Wait, None, None]]) -> None:
        """Drive one generator per rank to its end.

        Raises:
            MismatchError: the ranks issue different collectives, sizes or numbers of collectives.
        """
        if len(exchanges) != self.world:
            raise ValueError(f"{len(exchanges)} exchanges for {self.world} ranks")
        while True:
            # what is issued ahead is complete at once here, so there is nothing to wait for
            requests = [_next_collective(exchange) for exchange in exchanges]
            live = [request for request in requests if request is not None]
            if not live:
                return
            kinds = {type(request).__name__ for request in live}
            sizes = {request.wire_bytes(self.world) for request in live}
            if len(live) < self.world or len(kinds) > 1 or len(sizes) > 1:
                raise MismatchError(
                    f"virtual ranks diverge: {len(live)} of {self.world} ranks issue {kinds} of {sizes} bytes"
                )
            self.bytes_sent += sizes.pop()
            self.calls += 1
            self._perform(live)

    def _perform(self, requests: Sequence[Collective]) -> None:
        reduces = [request for request in requests if isinstance(request, AllReduce)]
        if reduces:
            total = torch.stack([request.tensor for request in reduces]).sum(0)
            for request in reduces:
                request.tensor.copy_(total)
            return
        gathers = [request for request in requests if isinstance(request, AllGather)]
        if gathers:
            everything = torch.cat([request.send for request in gathers])
            for gather in gathers:
                gather.recv.copy_(everything)
            return
        scatters = [request for request in requests if isinstance(request, ReduceScatter)]
        if scatters:
            total = torch.stack([request.send for request in scatters]).sum(0).view(self.world, -1)
            for rank, scatter in enumerate(scatters):
                scatter.recv.copy_(total[rank])
            return
        exchanges = [request for request in requests if isinstance(request, AllToAll)]
        matrix = torch.stack([request.send.view(self.world, -1) for request in exchanges])
        for rank, exchange in enumerate(exchanges):
            exchange.recv.view(self.world, -1).copy_(matrix[:, rank])


def _next_collective(exchange: Generator[Collective | Wait, None, None]) -> Collective | None:
    for request in exchange:
        if not isinstance(request, Wait):
            return request
    return None
