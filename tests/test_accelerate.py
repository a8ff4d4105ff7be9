"""Accelerate: real training loops on two CPU ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import trainers
import workers
from trainers import ACCUMULATE, CLIP, EXACT, LOGGED, STEPS, Task, name_of
from workers import Battery, all_specs

pytestmark = pytest.mark.timeout(trainers.TIMEOUT + 20)


class Run:
    """A script of Accelerate's users: prepare, train, save and load."""

    def __init__(
        self, rank: int, spec: Any, *, accumulate: int = 1, clip: float = 0.0, bf16: bool = False, late: bool = False,
        models: int = 1, shard: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        from gradcomp.integrations.accelerate import register

        trainers.as_launched(rank, trainers.WORLD)
        AcceleratorState._reset_state(reset_partial_state=True)
        mixed = "bf16" if bf16 else "no"
        self.accelerator = Accelerator(
            **{"cpu": True, "gradient_accumulation_steps": accumulate, "mixed_precision": mixed, **options}
        )
        if shard:
            self.use_fsdp2()
        self.clip, self.compression = clip, None
        if spec is not None and not late:
            self.compression = register(self.accelerator, spec)
        loader = torch.utils.data.DataLoader(trainers.data("batch"), batch_size=trainers.ROWS)
        tasks = [Task(seed) for seed in range(models)]
        *self.models, self.optimizer, self.loader = self.accelerator.prepare(*tasks, trainers.sgd(tasks[0]), loader)
        if late:
            self.compression = register(self.accelerator, spec, model=self.models[0])

    def use_fsdp2(self) -> None:
        """What Accelerate does with ``fsdp_plugin=`` on accelerators; on CPUs it leaves the plugin out without a word."""
        from accelerate import DistributedType
        from accelerate.state import PartialState
        from accelerate.utils import FullyShardedDataParallelPlugin

        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"],
            state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False,
        )  # fmt: skip
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        for state in (self.accelerator.state._shared_state, PartialState._shared_state):
            state["distributed_type"] = DistributedType.FSDP
        assert self.accelerator.is_fsdp2

    def train(self, epochs: int = 1) -> list[float]:
        losses, model = [], self.models[0]
        for _ in range(epochs):
            for x, y in self.loader:
                with self.accelerator.accumulate(model):
                    loss = model(x, y)["loss"]
                    self.accelerator.backward(loss)
                    if self.clip and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(model.parameters(), self.clip)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    def digest(self) -> str:
        return workers.digest(trainers.whole(self.accelerator.unwrap_model(self.models[0], keep_torch_compile=False)))


def exact(rank: int, world: int, spec: str, options: dict[str, Any], late: bool = False) -> Any:
    """Accelerate's result and that of the same training in plain PyTorch."""
    with trainers.only_our_warnings() as said:
        run = Run(rank, spec, late=late, **options)
        run.train()
    return run.digest(), trainers.plain(rank, spec, **options), run.compression.handle.stats().wire_bytes, said


def resume(rank: int, world: int, spec: str, folder: str, **options: Any) -> Any:
    """Four epochs without and with an interruption, by save_state and load_state, after two."""
    path = f"{folder}/{spec}{len(options)}"
    with trainers.only_our_warnings() as said:
        whole = Run(rank, spec, **options)
        losses = whole.train(4)
        first = Run(rank, spec, **options)
        parts = first.train(2)
        first.accelerator.save_state(path)
        second = Run(rank, spec, **options)
        second.accelerator.load_state(path)
        parts += second.train(2)
    return (losses, parts), (whole.digest(), second.digest()), whole.compression.handle.stats().wire_bytes, said


def sharded(rank: int, world: int, spec: str, folder: str) -> Any:
    return resume(rank, world, spec, folder, shard=True, accumulate=ACCUMULATE, clip=CLIP)


def compiled(rank: int, world: int, spec: str) -> Any:
    from accelerate.utils import TorchDynamoPlugin

    with trainers.only_our_warnings() as said:
        run = Run(rank, spec, dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))
        losses = run.train(2)
    return run.digest(), losses, run.compression.handle.stats().compressed_steps, said


def logs(rank: int, world: int) -> Any:
    """Numbers for ``accelerator.log``; two models."""
    from accelerate.tracking import GeneralTracker

    class Recorder(GeneralTracker):
        name, requires_logging_directory, tracker = "recorder", False, None
        main_process_only = True

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[Any] = []

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
            self.rows.append((step, values))

    recorder = Recorder()
    with trainers.only_our_warnings() as said:
        run = Run(rank, "onebit", log_with=recorder)
        run.accelerator.init_trackers("project")
        before = run.compression.metrics()
        run.train()
        run.accelerator.log(run.compression.metrics(), step=STEPS)
        several = Run(rank, "int8", models=2)
        several.train()
        error = trainers.error_of(lambda: several.compression.handle)
    return before, recorder.rows, sorted(several.compression.metrics()), error, said


def refusals(rank: int, world: int, folder: str) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from gradcomp.integrations.accelerate import register

    texts = {}
    with trainers.only_our_warnings() as said:
        plain = Run(rank, None)
        texts["not prepared"] = trainers.error_of(lambda: register(Accelerator(cpu=True), "int8").handle)
        texts["no model"] = trainers.error_of(lambda: register(plain.accelerator, "int8"))
        texts["bad spec"] = trainers.error_of(lambda: Run(rank, "int9"))
        texts["ranks differ"] = trainers.error_of(lambda: Run(rank, "int8" if rank else "int4"))
        own = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
        texts["second hook"] = trainers.error_of(lambda: Run(rank, "int8", kwargs_handlers=[own]))
        texts["not cpu"] = trainers.error_of(lambda: Run(rank, "int8", cpu=False))
        plain.accelerator.save_state(f"{folder}/without")
        run = Run(rank, "onebit")
        run.accelerator.load_state(f"{folder}/without")
    texts["no state"] = " ".join(said)
    with trainers.only_our_warnings():
        run.train()
        run.accelerator.save_state(f"{folder}/damaged")
        run.accelerator.wait_for_everyone()
        if rank == 1:
            path = Path(folder, "damaged", "gradcomp_rank1_of_2.pt")
            path.write_bytes(path.read_bytes()[:100])
        texts["damaged"] = trainers.error_of(lambda: run.accelerator.load_state(f"{folder}/damaged"))
        if rank == 1:
            path.unlink()
        run.accelerator.wait_for_everyone()
        texts["missing"] = trainers.error_of(lambda: run.accelerator.load_state(f"{folder}/damaged"))
    AcceleratorState._reset_state(reset_partial_state=True)
    return texts


@pytest.fixture(scope="module")
def battery(tmp_path_factory: pytest.TempPathFactory) -> Battery:
    folder = str(tmp_path_factory.mktemp("accelerate"))
    return Battery(
        2,
        {
            **{("exact", name_of(case)): (exact, case) for case in EXACT},
            "late": (exact, ("onebit", {"accumulate": ACCUMULATE, "clip": CLIP}, True)),
            **{("resume", spec): (resume, (spec, folder)) for spec in all_specs()},
            **{("sharded", spec): (sharded, (spec, folder)) for spec in trainers.SHARDED},
            **{("compiled", spec): (compiled, (spec,)) for spec in ("int8", "onebit")},
            "logs": (logs, ()),
            "documentation": (trainers.documented, ("Accelerate", folder)),
            "refusals": (refusals, (folder,)),
        },
        timeout=trainers.TIMEOUT,
    )


@pytest.mark.parametrize("case", EXACT, ids=name_of)
def test_same_bits_as_plain_ddp(battery: Battery, case: Any) -> None:
    """Full precision and bf16, accumulation, clipping; registered before ``prepare``."""
    results = battery["exact", name_of(case)]
    for ours, plain, sent, said in results:
        assert ours == plain
        assert sent > 0
        assert said == []
    assert results[0][0] == results[1][0]


def test_registered_after_prepare(battery: Battery) -> None:
    for ours, plain, sent, said in battery["late"]:
        assert ours == plain
        assert sent > 0
        assert said == []


@pytest.mark.parametrize("spec", all_specs())
def test_resume_equals_no_interruption(battery: Battery, spec: str) -> None:
    """Each compressor, through save_state and load_state."""
    for (whole, parts), (one, other), sent, said in battery["resume", spec]:
        assert len(whole) == 4 * STEPS
        assert whole == parts
        assert one == other
        assert sent > 0
        assert said == []


@pytest.mark.parametrize("spec", trainers.SHARDED)
def test_fsdp2_resume_equals_no_interruption(battery: Battery, spec: str) -> None:
    """With accumulation and clipping."""
    for (whole, parts), (one, other), sent, said in battery["sharded", spec]:
        assert len(whole) == 4 * STEPS
        assert whole == parts
        assert one == other
        assert sent > 0
        assert [text for text in said if "error feedback in FSDP2" not in text] == []


@pytest.mark.parametrize("spec", ["int8", "onebit"])
def test_compiled(battery: Battery, spec: str) -> None:
    (one, losses, steps, said), (other, *_) = battery["compiled", spec]
    assert one == other
    assert steps == 2 * STEPS
    assert sum(losses[STEPS:]) < sum(losses[:STEPS])
    assert said == []


def test_numbers_for_trackers(battery: Battery) -> None:
    before, rows, several, error, said = battery["logs"][0]
    assert before["gradcomp/wire_bytes"] == 0
    ((step, numbers),) = rows
    assert step == STEPS
    assert numbers.keys() == LOGGED
    assert numbers["gradcomp/ratio_per_step"] > 10
    assert len(several) == 2 * len(LOGGED)
    assert several[0].startswith("gradcomp0/")
    assert several[-1].startswith("gradcomp1/")
    assert "2 models are compressed: take .handles" in error
    assert said == []


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("not prepared", ["GradcompError: 0 models are compressed: is prepare() still to come?"]),
        ("no model", ["ConfigError: model=None", "allowed is the model that it returned"]),
        ("bad spec", ["ConfigError: compressor='int9'"]),
        ("ranks differ", ["MismatchError", "all ranks must pass the same arguments"]),
        ("second hook", ["UnsupportedError: this DDP module already has the communication hook fp16_compress_hook"]),
        ("not cpu", ["UnsupportedError: 2 processes were started", "Accelerator(cpu=True)"]),
        ("no state", ["without holds no state of gradcomp; compression starts afresh"]),
        ("damaged", ["gradcomp_rank1_of_2.pt: cannot be read"]),
        ("missing", ["ConfigError", "ranks [1] do not see the states that they need"]),
    ],
)
def test_unsupported_is_said(battery: Battery, case: str, texts: list[str]) -> None:
    for said in battery["refusals"]:
        for text in texts:
            assert text in said[case]


def test_documentation_runs_as_written(battery: Battery) -> None:
    one, other = battery["documentation"]
    assert one == other
    assert [sent > 0 for sent, _ in one] == [True]
