"""Live progress: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gradcomp.demo.settings import Settings
from gradcomp.demo.train import Run

_LINES_PER_RUN = 4


class Display:
    """Shows what the ranks report; a context manager."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console, self._settings = console, settings
        self._bars: Progress | None = None
        self._tasks: list[TaskID] = []
        self._begun = time.monotonic()

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:24}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            for spec in self._settings.compressors:
                self._tasks.append(self._bars.add_task(spec, total=self._settings.steps, start=False, loss="     "))
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def progress(self, index: int, step: int, loss: float) -> None:
        """``step`` steps of compressor number ``index`` are done."""
        if self._bars is not None:
            if step == 1:
                self._bars.start_task(self._tasks[index])
            self._bars.update(self._tasks[index], completed=step, loss=f"{loss:5.3f}")
        elif step in (1, self._settings.steps) or step % -(-self._settings.steps // _LINES_PER_RUN) == 0:
            spec = self._settings.compressors[index]
            self._line(f"{spec}: step {step} of {self._settings.steps}, training loss {loss:.3f}")

    def finished(self, index: int, run: Run) -> None:
        """The compressor's results are in."""
        if self._bars is not None:
            self._bars.stop_task(self._tasks[index])
            return
        outcome = (
            f"diverged at step {run.diverged_at}" if run.diverged_at is not None else f"held-out loss {run.loss:.3f}"
        )
        self._line(f"{run.spec}: {outcome}, {run.ratio:.1f}x fewer bytes, {1e3 * run.step:.1f} ms a step")

    def _line(self, text: str) -> None:
        seconds = time.monotonic() - self._begun
        self._console.print(f"{seconds:5.0f} s  {text}", highlight=False, markup=False)

    def __call__(self, kind: str, content: Any) -> None:
        """Take a message from a rank."""
        if kind == "progress":
            self.progress(*content)
        elif kind == "run":
            self.finished(*content)
