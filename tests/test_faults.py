"""When ranks disagree, raise or die: every rank gets a clear error within the group's timeout, and never hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import workers
from workers import Battery

import gradcomp
from gradcomp import wire
from gradcomp.engine import BucketExchange
from gradcomp.testing import launch

TIMEOUT = 8.0
"""Of the process group, in seconds."""
SLACK = 25.0
"""For starting processes on a busy machine, on top of it."""


def caught(fn: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what ``fn`` raises."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def run_hook(ddp: Any) -> None:
    """The hook on a bucket of zeros, outside backward()."""
    ddp.reducer._run_comm_hook(ddp.reducer._get_zeros_like_grad_buckets()[0]).wait()


# ---------------------------------------------------------------- disagreement, before and between steps
def disagree(rank: int, world: int, what: str) -> tuple[str, str]:
    def step(value: int) -> str:
        return "int8" if value + rank < 3 else "int4"

    second = rank == 1
    options: dict[str, dict[str, Any]] = {
        "spec": {"spec": "int4" if second else "int8"},
        "option": {"spec": "int8:block=128" if second else "int8"},
        "rules": {"spec": "int8", "rules": [("layers.1.*", "none")] if second else None},
        "warm-up": {"spec": "int8", "warmup_steps": rank},
        "schedule": {"spec": "int8", "schedule": "thread" if second else "inline"},
        "function": {"spec": step if second else "int8"},
        "bad spec on one rank": {"spec": "int9" if second else "int8"},
    }
    if what in options:
        return caught(lambda: workers.setup(**options[what]))
    if what == "model":
        model = torch.nn.Linear(64, 64 + rank)  # DDP itself checks shapes, so it is told to leave that out
        ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
        return caught(lambda: gradcomp.register(ddp, "int8", backend=workers.BACKEND))
    ddp, optimizer, handle = workers.setup("int8")
    workers.train(ddp, optimizer, range(2), rank)
    error = caught(lambda: handle.set("int4" if second else "onebit"))
    if what == "set":
        return error
    # refused, the handle goes on with what it had
    workers.train(ddp, optimizer, range(2, 4), rank)
    return handle.stats().spec, str(handle.step)


DISAGREEMENTS = ["spec", "option", "rules", "warm-up", "schedule", "function", "model", "set"]
TALKS = Battery(
    2,
    {what: (disagree, (what,)) for what in [*DISAGREEMENTS, "bad spec on one rank", "set, then go on"]},
    group_timeout=TIMEOUT,
)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_pass_different_arguments_get_the_same_error(what: str) -> None:
    results = TALKS[what]
    assert results[0] == results[1]
    name, said = results[0]
    assert name == "MismatchError", said
    assert "rank 1" in said


def test_a_bad_argument_on_one_rank_is_an_error_on_every_rank() -> None:
    first, second = TALKS["bad spec on one rank"]
    assert second[0] == "ConfigError"
    assert first[0] == "MismatchError"
    assert "rank 1" in first[1]
    assert second[1] in first[1], "rank 0 hears what is wrong on rank 1"


def test_a_refused_set_changes_nothing() -> None:
    assert TALKS["set, then go on"] == [("int8", "4")] * 2


# ---------------------------------------------------------------- disagreement, in a step
def other_header(rank: int, world: int, what: str, spec: str, schedule: str) -> dict[str, Any]:
    """From step 3 on, rank 1 is made to send another layout, spec or step in its headers."""
    ddp, optimizer, handle = workers.setup(spec, schedule=schedule)
    original = wire.Header.__init__

    def lying(self: wire.Header, world: int, spec: int, layout: int, step: int) -> None:
        changed = {"spec": spec, "layout": layout, "step": step}
        changed[what] += 1
        original(self, world=world, **changed)

    workers.train(ddp, optimizer, range(3), rank)
    if rank == 1:
        wire.Header.__init__ = lying  # type: ignore[method-assign]
    try:
        first = caught(lambda: workers.train(ddp, optimizer, range(3, 4), rank))
    finally:
        wire.Header.__init__ = original  # type: ignore[method-assign]
    return {"first": first, "again": caught(lambda: run_hook(ddp)), "step": handle.step}


HEADERS = Battery(
    3,
    {
        key: (other_header, key)
        for key in [(what, "onebit", "auto") for what in ("layout", "spec", "step")]
        + [("layout", spec, "auto") for spec in ("fp16", "topk", "powersgd")]
        + [("layout", spec, t) for spec in ("int8", "powersgd") for t in ("inline", "thread", "pipeline:depth=3")]
    },
    group_timeout=TIMEOUT,
)


@pytest.mark.parametrize("key", list(HEADERS.cases), ids=lambda key: "-".join(key))
def test_headers_that_differ_raise_the_same_error_on_every_rank(key: Any) -> None:
    results = HEADERS[key]
    what, spec, _ = key
    words = {"layout": "bucket layout", "spec": "compressor spec", "step": "step"}
    for result in results:
        name, said = result["first"]
        assert name == "MismatchError", said
        assert words[what] in said
        assert said == results[0]["first"][1]
        assert spec == "powersgd" or "ranks [0, 2]" in said, "it says who differs"
        assert result["again"][0] == "GradcompError", "a handle that failed stays failed"
        assert said in result["again"][1]
        assert result["step"] == 3


def load_on_one_rank(rank: int, world: int) -> tuple[str, str]:
    ddp, optimizer, handle = workers.setup("int8")
    workers.train(ddp, optimizer, range(2), rank)
    state = handle.state_dict()
    workers.train(ddp, optimizer, range(2, 4), rank)
    if rank == 0:
        return caught(lambda: handle.load_state_dict(state))
    return caught(lambda: workers.train(ddp, optimizer, range(4, 8), rank))


def test_loading_on_one_rank_only_does_not_hang() -> None:
    begun = time.monotonic()
    outcomes = launch(load_on_one_rank, 2, group_timeout=TIMEOUT, timeout=60)
    assert time.monotonic() - begun < TIMEOUT + SLACK
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        assert outcome.value[0] in ("ExchangeError", "MismatchError", "GradcompError"), outcome.value


# ---------------------------------------------------------------- a rank that raises, a rank that dies
class Fault(Exception):
    """What the failing rank raises."""


def fail(rank: int, world: int, spec: str, schedule: str, how: str) -> dict[str, Any]:
    """At step 3 rank 1 raises in its encoder, or dies; what every rank gets, when, and what it gets afterwards."""
    ddp, optimizer, _ = workers.setup(spec, schedule=schedule)
    workers.train(ddp, optimizer, range(3), rank)
    begun = time.monotonic()
    if rank == 1:
        original = BucketExchange.run

        def run(self: BucketExchange, *args: Any) -> Any:
            exchange = original(self, *args)
            yield next(exchange)  # its first collective is on its way
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(3)
            raise Fault("the encoder of rank 1 fails")

        BucketExchange.run = run  # type: ignore[method-assign]
    first = caught(lambda: workers.train(ddp, optimizer, range(3, 4), rank))
    spent = time.monotonic() - begun
    begun = time.monotonic()
    again = caught(lambda: run_hook(ddp))
    return {"first": first, "again": again, "seconds": spent, "seconds again": time.monotonic() - begun}


FAULTS = [
    *(("int8", schedule, "kill") for schedule in workers.SCHEDULES),
    *(("int8", schedule, "raise") for schedule in ("inline", "thread", "pipeline:depth=3")),
    ("powersgd", "pipeline:depth=1", "raise"),
    ("topk", "pipeline:depth=1", "exit"),
]


@pytest.mark.parametrize(("spec", "schedule", "how"), FAULTS)
def test_when_one_rank_fails_the_others_get_an_error_and_nobody_hangs(spec: str, schedule: str, how: str) -> None:
    outcomes = launch(fail, 2, spec, schedule, how, group_timeout=TIMEOUT, timeout=60)
    survivor = outcomes[0]
    assert survivor.ok, survivor.error
    name, said = survivor.value["first"]
    assert name == "ExchangeError", said
    assert "another rank died, raised an error" in said
    assert survivor.value["seconds"] < TIMEOUT + 4
    if how == "raise":
        assert outcomes[1].ok, outcomes[1].error
        assert outcomes[1].value["first"] == ("Fault", "the encoder of rank 1 fails")
    else:
        assert outcomes[1].error == f"no result, exit code {-signal.SIGKILL if how == 'kill' else 3}"
    for outcome in outcomes:
        if outcome.ok:  # once failed, a handle says so at once instead of waiting again
            assert "this handle stopped at step 3 after an error" in outcome.value["again"][1]
            assert outcome.value["first"][1] in outcome.value["again"][1]
            assert outcome.value["seconds again"] < 1
