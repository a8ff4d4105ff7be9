"""Lightning: real fits of its Trainer on two CPU ranks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import trainers
import workers
from trainers import EXACT, LOGGED, STEPS, Task, name_of
from workers import Battery, all_specs

pytestmark = pytest.mark.timeout(trainers.TIMEOUT + 20)


def fit(rank: int, callback: Any, *, epochs: int = 1, load: str | None = None, **options: Any) -> Any:
    """One fit; returns the trainer and its module, which has the losses of all batches."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task, self.losses = Task(), []

        def configure_model(self) -> None:
            if shard:
                for layer in self.task.net.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.task, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.task(*batch)["loss"]
            self.losses.append(loss.detach().item())
            return loss

        def configure_optimizers(self) -> Any:
            return trainers.sgd(self)

    shard = isinstance(options.get("strategy"), ModelParallelStrategy)
    module: Any = Module()
    compiled = torch.compile(module, backend="aot_eager") if options.pop("compile", False) else module
    settings = {
        "accelerator": "cpu", "devices": 2, "strategy": DDPStrategy(bucket_cap_mb=workers.CAP_MB), "max_epochs": epochs,
        "callbacks": [] if callback is None else [callback], "use_distributed_sampler": False, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = pl.Trainer(**{**settings, **options})
    dataset = trainers.data("sample")
    sampler = torch.utils.data.DistributedSampler(dataset, trainers.WORLD, rank, shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, batch_size=trainers.ROWS, sampler=sampler)
    trainer.fit(compiled, loader, ckpt_path=load)
    return trainer, module


def callback(spec: Any = "int8", **options: Any) -> Any:
    from gradcomp.integrations.lightning import GradcompCallback

    return GradcompCallback(spec, **options)


def exact(rank: int, world: int, spec: str, options: dict[str, Any]) -> Any:
    """Lightning's result and that of the same training in plain PyTorch."""
    trainers.as_launched(rank, world)
    with trainers.only_our_warnings() as said:
        ours = callback(spec)
        _, module = fit(
            rank, ours, accumulate_grad_batches=options.get("accumulate", 1),
            gradient_clip_val=options.get("clip"), precision="bf16-mixed" if "bf16" in options else "32-true",
        )  # fmt: skip
    sent = ours.handle.stats().wire_bytes
    return workers.digest(module.task), trainers.plain(rank, spec, **options), sent, said


def resume(rank: int, world: int, spec: str, folder: str, shard: bool = False) -> Any:
    """Four epochs without and with an interruption, by a checkpoint of Lightning's, after two."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    def options() -> dict[str, Any]:
        return {"strategy": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)} if shard else {}

    trainers.as_launched(rank, world)
    path = f"{folder}/{spec}{shard}.ckpt"
    with trainers.only_our_warnings() as said:
        ours = callback(spec)
        _, whole = fit(rank, ours, epochs=4, **options())
        trainer, first = fit(rank, callback(spec), epochs=2, **options())
        trainer.save_checkpoint(path)
        _, second = fit(rank, callback(spec), epochs=4, load=path, **options())
    losses = whole.losses, first.losses + second.losses
    digests = [workers.digest(trainers.whole(module)) for module in (whole, second)]
    return losses, digests, ours.handle.stats().wire_bytes, said


def logs(rank: int, world: int) -> Any:
    """What a logger gets."""
    from lightning.pytorch.loggers import Logger

    class Recorder(Logger):
        name, version = "recorder", 0
        rows: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.rows.append((step, dict(metrics)))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    trainers.as_launched(rank, world)
    with trainers.only_our_warnings() as said:
        recorder: Any = Recorder()
        fit(rank, callback("onebit"), logger=recorder, log_every_n_steps=2)
    return [row for row in recorder.rows if any(name.startswith("gradcomp") for name in row[1])], said


def compiled(rank: int, world: int, spec: str) -> Any:
    trainers.as_launched(rank, world)
    with trainers.only_our_warnings() as said:
        ours = callback(spec)
        _, module = fit(rank, ours, compile=True, epochs=2, strategy="ddp")
    return workers.digest(module.task), module.losses, ours.handle.stats().compressed_steps, said


def as_on_cuda(**options: Any) -> Any:
    """DDPStrategy that registers hooks as Lightning does on CUDA."""
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.strategies.ddp import _register_ddp_comm_hook

    class AsOnCuda(DDPStrategy):
        def _register_ddp_hooks(self) -> None:
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    return AsOnCuda(**options)


def pair(rank: int, world: int) -> Any:
    """The pair in DDPStrategy, where it is applied; and on CPU, where Lightning leaves it out."""
    from lightning.pytorch.strategies import DDPStrategy

    from gradcomp.integrations.lightning import ddp_hook

    trainers.as_launched(rank, world)
    with trainers.only_our_warnings():
        state, hook = ddp_hook("onebit")
        early = trainers.error_of(lambda: state.handle)
        _, module = fit(rank, None, strategy=as_on_cuda(ddp_comm_state=state, ddp_comm_hook=hook))
        sent = state.handle.stats().wire_bytes
        state, hook = ddp_hook("onebit")
        ignored = trainers.error_of(
            lambda: fit(rank, None, strategy=DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook))
        )
        _, after = fit(rank, callback("none"))  # the refused pair does not stop later fits
    return workers.digest(module.task), trainers.plain(rank, "onebit"), sent, early, ignored, len(after.losses)


def refusals(rank: int, world: int, folder: str) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    from gradcomp.integrations.lightning import ddp_hook

    trainers.as_launched(rank, world)
    texts = {}
    with trainers.only_our_warnings() as said:
        single = callback()
        fit(rank, single, devices=1, strategy="auto", default_root_dir=folder)
        texts["handle"] = trainers.error_of(lambda: single.handle)
    texts["one process"] = " ".join(said)
    with trainers.only_our_warnings() as said:
        fit(rank, callback(), strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2))
    texts["one shard"] = " ".join(said)
    with trainers.only_our_warnings():

        def twice() -> None:
            state, hook = ddp_hook()
            fit(rank, callback(), strategy=as_on_cuda(ddp_comm_state=state, ddp_comm_hook=hook))

        texts["second hook"] = trainers.error_of(twice)
        gc.collect()  # the pair, which would say that the next fit does not use it
        texts["bad spec"] = trainers.error_of(lambda: fit(rank, callback("int9")))
    with trainers.only_our_warnings() as said:
        trainer, _ = fit(rank, None)
        trainer.save_checkpoint(f"{folder}/without.ckpt")
        fit(rank, callback("onebit"), epochs=2, load=f"{folder}/without.ckpt")
    texts["no state"] = " ".join(said)
    return texts


@pytest.fixture(scope="module")
def battery(tmp_path_factory: pytest.TempPathFactory) -> Battery:
    folder = str(tmp_path_factory.mktemp("lightning"))
    return Battery(
        2,
        {
            **{("exact", name_of(case)): (exact, case) for case in EXACT},
            **{("resume", spec): (resume, (spec, folder)) for spec in all_specs()},
            **{("sharded", spec): (resume, (spec, folder, True)) for spec in trainers.SHARDED},
            **{("compiled", spec): (compiled, (spec,)) for spec in ("int8", "onebit")},
            "logs": (logs, ()),
            "pair": (pair, ()),
            "documentation": (trainers.documented, ("Lightning", folder)),
            "refusals": (refusals, (folder,)),
        },
        timeout=trainers.TIMEOUT,
    )


@pytest.mark.parametrize("case", EXACT, ids=name_of)
def test_same_bits_as_plain_ddp(battery: Battery, case: Any) -> None:
    """Full precision and bf16, accumulation, clipping."""
    results = battery["exact", name_of(case)]
    for ours, plain, sent, said in results:
        assert ours == plain
        assert sent > 0
        assert said == []
    assert results[0][0] == results[1][0]


@pytest.mark.parametrize("spec", all_specs())
def test_resume_equals_no_interruption(battery: Battery, spec: str) -> None:
    """Each compressor, through Lightning's checkpoint."""
    for (whole, parts), (one, other), sent, said in battery["resume", spec]:
        assert len(whole) == 4 * STEPS
        assert whole == parts
        assert one == other
        assert sent > 0
        assert said == []


@pytest.mark.parametrize("spec", trainers.SHARDED)
def test_fsdp2_resume_equals_no_interruption(battery: Battery, spec: str) -> None:
    """ModelParallelStrategy, where ``configure_model`` calls ``fully_shard``."""
    for (whole, parts), (one, other), sent, said in battery["sharded", spec]:
        assert len(whole) == 4 * STEPS
        assert whole == parts
        assert one == other
        assert sent > 0
        assert [text for text in said if "error feedback in FSDP2" not in text] == []


def test_stats_are_logged(battery: Battery) -> None:
    rows, said = battery["logs"][0]
    assert [step for step, _ in rows] == [1, 3, 5]
    for _, numbers in rows:
        assert numbers.keys() == LOGGED
    assert rows[-1][1]["gradcomp/ratio_per_step"] > 10
    assert rows[0][1]["gradcomp/wire_bytes"] < rows[-1][1]["gradcomp/wire_bytes"]
    assert said == []
    assert battery["logs"][1][0] == []  # rank 0 logs


@pytest.mark.parametrize("spec", ["int8", "onebit"])
def test_compiled(battery: Battery, spec: str) -> None:
    (one, losses, steps, said), (other, *_) = battery["compiled", spec]
    assert one == other
    assert steps == 2 * STEPS
    assert sum(losses[STEPS:]) < sum(losses[:STEPS])
    assert said == []


def test_pair_in_the_strategy(battery: Battery) -> None:
    for ours, plain, sent, early, ignored, batches in battery["pair"]:
        assert ours == plain
        assert sent > 0
        assert early == "GradcompError: there is no handle before the first backward pass"
        assert ignored.startswith("UnsupportedError")
        assert "CUDA devices only" in ignored
        assert "GradcompCallback" in ignored
        assert batches == STEPS


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("one process", "one process, so no gradients are exchanged"),
        ("one shard", "none compressed (data_parallel_size is 1)"),
        ("handle", "GradcompCallback has no handle: no fit with several processes has started"),
        ("second hook", "already has the communication hook late_gradcomp_hook"),
        ("bad spec", "ConfigError"),
        ("no state", "without.ckpt holds no state of gradcomp; compression starts afresh"),
    ],
)
def test_unsupported_is_said(battery: Battery, case: str, text: str) -> None:
    for texts in battery["refusals"]:
        assert text in texts[case]


def test_documentation_runs_as_written(battery: Battery) -> None:
    one, other = battery["documentation"]
    assert one == other
    assert [sent > 0 for sent, _ in one] == [True]
