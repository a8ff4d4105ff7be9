"""Requests, their volumes, and the names that torch gave them over the years."""

import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradcomp import ConfigError, ExchangeError, MismatchError, collectives
from gradcomp.collectives import AllGather, AllReduce, AllToAll, Collective, Group
from gradcomp.errors import GradcompError
from gradcomp.testing import launch
from gradcomp.virtual import VirtualGroup


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Group(dist.group.WORLD)
    dist.destroy_process_group()


def test_volumes() -> None:
    bytes_ = torch.zeros(1200, dtype=torch.uint8)
    assert AllReduce(torch.zeros(300)).wire_bytes(4) == 1800
    assert AllReduce(torch.zeros(300, dtype=torch.bfloat16)).wire_bytes(2) == 600
    assert AllToAll(bytes_, bytes_).wire_bytes(4) == 900
    assert AllGather(bytes_, bytes_).wire_bytes(4) == 3600
    assert all(request.wire_bytes(1) == 0 for request in (AllReduce(bytes_), AllToAll(bytes_, bytes_)))


def test_old_torch_has_another_name_for_all_gather(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 to 2.12: all_gather_into_tensor, with the same positional arguments."""
    old = types.SimpleNamespace(all_gather_into_tensor=dist.all_gather_into_tensor)
    assert collectives._find_all_gather(old) is old.all_gather_into_tensor
    new = types.SimpleNamespace(all_gather_single=print, all_gather_into_tensor=repr)
    assert collectives._find_all_gather(new) is print
    monkeypatch.setattr(collectives, "_find_all_gather", lambda module: dist.all_gather_into_tensor)
    send, recv = torch.arange(5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        group.run(AllGather(send, recv))
    assert torch.equal(send, recv)


@pytest.mark.parametrize("kind", ["reduce", "to all", "gather"])
def test_real_collectives_are_counted(group: Group, kind: str) -> None:
    send, recv = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    requests: dict[str, Collective] = {
        "reduce": AllReduce(send.clone()), "to all": AllToAll(send, recv), "gather": AllGather(send, recv),
    }  # fmt: skip
    group.run(requests[kind])
    assert (group.calls, group.bytes_sent) == (1, 0)  # alone, nothing reaches the network
    assert kind == "reduce" or torch.equal(send, recv)


def test_virtual_ranks_that_diverge_are_noticed() -> None:
    def exchange(*requests: Collective) -> Iterator[Collective]:
        yield from requests

    short, long = AllReduce(torch.zeros(4)), AllReduce(torch.zeros(8))
    gather = AllGather(torch.zeros(4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8))
    for one, other in (((short,), (long,)), ((short,), ()), ((short,), (gather,))):
        with pytest.raises(MismatchError, match="diverge"):
            VirtualGroup(2).run([exchange(*one), exchange(*other)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="1 exchanges for 2 ranks"):
        VirtualGroup(2).run([exchange()])  # type: ignore[list-item]


def refuse(rank: int, world: int) -> str:
    group = Group(dist.group.WORLD)  # type: ignore[arg-type]

    def describe() -> str:
        if rank == 1:
            raise ConfigError("block=3: allowed is more")
        return "same"

    try:
        group.agree(describe, "test")
    except GradcompError as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


def test_a_rank_that_refuses_tells_the_others() -> None:
    said = [outcome.value for outcome in launch(refuse, 3)]
    assert said[1] == "ConfigError: block=3: allowed is more"
    assert said[0] == said[2] == "MismatchError: test: refused on other ranks: rank 1: block=3: allowed is more"


def lonely(rank: int, world: int) -> str:
    group = Group(dist.group.WORLD)  # type: ignore[arg-type]
    if rank == 1:
        return "left"
    try:
        group.run(AllReduce(torch.zeros(4)))
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_a_missing_rank_is_a_clear_error_within_the_timeout() -> None:
    outcomes = launch(lonely, 2, group_timeout=5, timeout=40)
    assert "another rank died, raised an error" in outcomes[0].value
    assert "rank 0 of 2: AllReduce failed" in outcomes[0].value
