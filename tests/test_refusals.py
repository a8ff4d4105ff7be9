"""What cannot work is refused at registration, with a message that names the way out; what works badly draws a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import Battery, Net

import gradcomp
from gradcomp import ConfigError, UnsupportedError
from gradcomp.kernels import select


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """A process group of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def register(ddp: Any = None, spec: Any = "int8", **options: Any) -> gradcomp.Handle:
    return gradcomp.register(DDP(Net()) if ddp is None else ddp, spec, **{"backend": workers.BACKEND, **options})


# ---------------------------------------------------------------- combinations
def test_a_module_that_is_not_in_ddp() -> None:
    with pytest.raises(
        UnsupportedError, match=r"got Net: wrap the model first, ddp = DistributedDataParallel\(model\)"
    ):
        register(Net())


def test_a_second_registration() -> None:
    ddp = DDP(Net())
    register(ddp)
    with pytest.raises(UnsupportedError, match=r"already has the communication hook gradcomp_hook.*handle\.set\(\)"):
        register(ddp)


def test_a_slot_that_another_hook_has_taken() -> None:
    ddp = DDP(Net())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(UnsupportedError, match="already has the communication hook allreduce_hook"):
        register(ddp)


def test_mixed_precision_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = DDP(Net())
    monkeypatch.setattr(ddp, "mixed_precision", object())  # torch refuses to build it without an accelerator
    with pytest.raises(UnsupportedError, match=r"use torch\.autocast or a bf16 model"):
        register(ddp)


def test_skipping_unused_parameters() -> None:
    ddp = DDP(Net(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    with pytest.raises(UnsupportedError, match=r"skip_all_reduce_unused_params=True.*leave it off"):
        register(ddp)


def test_the_python_reducer() -> None:
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(UnsupportedError, match=r"python_reducer.*; use True"),
    ):
        register()


def test_the_python_reducer_turned_on_after_registration() -> None:
    with pytest.raises(UnsupportedError, match=r"python_reducer.*; use True"):
        gradcomp.integrations.ddp.gradcomp_hook(None, (torch.zeros(1), torch.zeros(1)))  # type: ignore[arg-type]


def test_a_refused_model_can_still_be_registered() -> None:
    ddp = DDP(Net())
    with pytest.raises(ConfigError):
        register(ddp, "int9")
    assert register(ddp).stats().spec == "int8"


# ---------------------------------------------------------------- backends
def test_cuda_kernels_on_cpu_tensors_by_name() -> None:
    with pytest.raises(UnsupportedError, match="backend='torch'"):
        register(backend="cuda")


def test_numba_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "No module named 'numba'; install it with: pip install numba"
    monkeypatch.setitem(select._LOADERS, "cpu", ("numba", lambda: (None, missing)))
    with pytest.raises(UnsupportedError, match="'numba' cannot be used: No module named 'numba'; install it"):
        register(backend="numba")
    assert register(backend="auto").stats().backend == "torch"


def test_an_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="backend='fast': allowed are auto, torch, numba, cuda"):
        register(backend="fast")


# ---------------------------------------------------------------- options
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "compressor": ({"spec": "int9"}, "compressor='int9': allowed are none, .*did you mean 'int"),
    "option": ({"spec": "topk:ration=0.1"}, "topk has no option 'ration'; allowed are ratio, .*did you mean 'ratio'"),
    "range": ({"spec": "topk:ratio=2"}, "ratio=2.0: allowed is a number above 0, at most 1"),
    "number": ({"spec": "int8:block=big"}, "block='big': allowed is a whole number"),
    "power": ({"spec": "int8:block=100"}, "block=100: allowed is a power of two from 32 to 65536"),
    "flag": ({"spec": "int8:stochastic=yes"}, "stochastic='yes': allowed is true or false"),
    "choice": ({"spec": "fp16:accumulate=fp64"}, "accumulate='fp64': allowed is 'fp32' or 'wire'"),
    "object": ({"spec": 8}, "spec=8: allowed is a string"),
    "schedule": ({"schedule": "overlap"}, "schedule='overlap': allowed are 'auto', 'inline'"),
    "depth": ({"schedule": "pipeline:depth=0"}, r"schedule='pipeline:depth=0': allowed are .*depth=1\.\.64"),
    "warm-up": ({"warmup_steps": -1}, "warmup_steps=-1: allowed is a whole number"),
    "scaler": ({"scaler": 1024.0}, r"scaler=1024\.0: allowed is a GradScaler or None"),
    "rules": ({"rules": ["embed"]}, r"rules: 'embed': allowed is gradcomp\.Rule\(\.\.\.\) or a pair"),
    "rule's spec": ({"rules": [("*", "int9")]}, "compressor='int9': allowed are none"),
}


@pytest.mark.parametrize("what", list(OPTIONS))
def test_a_bad_option_is_named_with_its_value_and_what_is_allowed(what: str) -> None:
    options, words = OPTIONS[what]
    with pytest.raises(ConfigError, match=words):
        register(**options)


# ---------------------------------------------------------------- nothing to compress
def test_a_model_of_which_nothing_would_be_compressed() -> None:
    tiny = DDP(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"no parameter would be compressed \(fewer than 1024 elements\).*rules="):
        register(tiny, "int8")


def test_nothing_is_compressed_if_the_user_says_so() -> None:
    assert register(DDP(nn.Linear(4, 4)), "none").stats().bypassed["weight"] == "the spec is none"
    assert register(DDP(nn.Linear(4, 4)), "int8", rules=[("*", "none")]).stats().bypassed["bias"] == "rule '*'"
    assert register(DDP(nn.Linear(4, 4)), "int8", rules=[("weight", "int8")]).stats().bypassed.keys() == {"bias"}


def nothing_arrives(rank: int, world: int) -> str:
    """DDP keeps the only large parameter away from the hook: then nothing that is left can be compressed."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 4))
    name, weight = "0.weight", model[0].weight
    ddp = DDP(model, delay_all_reduce_named_params=[(name, weight)], param_to_hook_all_reduce=model[1].bias)
    with pytest.warns(UserWarning, match="delay_all_reduce_named_params bypass the hook"):
        gradcomp.register(ddp, "int8", backend=workers.BACKEND)
    with pytest.raises(UnsupportedError) as caught:
        ddp(torch.ones(2, 32)).sum().backward()
    return str(caught.value)


def test_a_first_step_that_compresses_nothing_is_an_error() -> None:
    for said in Battery(2, {"": (nothing_arrives, ())})[""]:
        assert "step 0: nothing was compressed although int8 was asked for" in said


# ---------------------------------------------------------------- warnings
ACCUMULATION = r"backward\(\) ran twice without an optimizer step.*ddp\.no_sync\(\)"


def on_two_ranks() -> DDP:
    ddp = DDP(Net())
    register(ddp)
    return ddp


def accumulate_without_no_sync(rank: int, world: int) -> int:
    ddp = on_two_ranks()
    workers.loss_of(ddp, 0, rank).backward()
    with pytest.warns(UserWarning, match=ACCUMULATION) as caught:
        workers.loss_of(ddp, 1, rank).backward()
    for step in range(2, 5):
        workers.loss_of(ddp, step, rank).backward()  # here a warning is an error
    return len(caught)


def accumulate_with_no_sync(rank: int, world: int) -> int:
    ddp = on_two_ranks()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(9):
        with workers.without_sync(ddp, step % 3 < 2):
            workers.loss_of(ddp, step, rank).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return 0


def train_with(rank: int, world: int, name: str, options: dict[str, bool]) -> int:
    ddp = on_two_ranks()
    workers.train(ddp, getattr(torch.optim, name)(ddp.parameters(), lr=0.01, **options), range(3), rank)
    return 0


def train_the_last_layer(rank: int, world: int) -> int:
    ddp = on_two_ranks()
    workers.train(ddp, torch.optim.SGD(ddp.module.layers[-1].parameters(), lr=0.1), range(3), rank)
    return 0


def train_by_hand(rank: int, world: int) -> int:
    ddp = on_two_ranks()
    for step in range(3):
        workers.loss_of(ddp, step, rank).backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter -= 0.1 * parameter.grad
        ddp.zero_grad()
    return 0


def skip_by_scaler(rank: int, world: int) -> int:
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=1e-6)
    handle = register(ddp, scaler=scaler)
    for step in range(3):
        optimizer.zero_grad()
        (scaler.scale(100 * workers.loss_of(ddp, step, rank))).backward()  # overflows at first
        scaler.step(optimizer)
        scaler.update()
    return handle.stats().skipped_steps


OPTIMIZERS = {
    f"{name} {options}": (train_with, (name, options))
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop")
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True})
    if not (name == "RMSprop" and "fused" in options)
}
WATCHED = Battery(
    2,
    {
        "without": (accumulate_without_no_sync, ()),
        "with": (accumulate_with_no_sync, ()),
        "last layer": (train_the_last_layer, ()),
        "by hand": (train_by_hand, ()),
        "scaler": (skip_by_scaler, ()),
        **OPTIMIZERS,
    },
)


def test_accumulation_without_no_sync_warns_once() -> None:
    assert WATCHED["without"] == [1, 1]


@pytest.mark.parametrize("how", ["with", "last layer", "by hand", *OPTIMIZERS])
def test_accumulation_with_no_sync_and_ordinary_training_do_not_warn(how: str) -> None:
    assert WATCHED[how] == [0, 0]  # warnings are errors there


def test_a_step_that_grad_scaler_skipped_is_not_taken_for_accumulation() -> None:
    assert WATCHED["scaler"] == [1, 1]


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("spec", ["onebit", "topk"])
def test_strong_bias_under_an_adaptive_optimizer_warns(optimizer: Any, spec: str) -> None:
    ddp = DDP(Net())
    words = f"{spec} gradients under {optimizer.__name__} converge worse.*int8 and int4 do not"
    with pytest.warns(UserWarning, match=words) as caught:
        register(ddp, spec, optimizer=optimizer(ddp.parameters()))
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points at the call of register()"


@pytest.mark.parametrize(
    ("optimizer", "spec"), [(torch.optim.SGD, "onebit"), (torch.optim.Adam, "int8"), (torch.optim.AdamW, "powersgd")]
)
def test_other_pairs_do_not_warn(optimizer: Any, spec: str) -> None:
    ddp = DDP(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register(ddp, spec, optimizer=optimizer(ddp.parameters(), lr=0.1))
