"""Mutants of the CUDA kernels: each barrier deleted, each bound off by one, in turn; a good test fails on every one.

A mutant is chosen at run time (``cuda_cpu_mutant``), so a source is compiled once for all of its mutants. Each runs the
scenario of a source that reaches it, in a forked child, in the three orders of threads, on arrays that end at a forbidden
page. It counts as found if a result or a canary is wrong, if the threads do what CUDA forbids, or if the child crashes or
hangs. Some barriers are needed only by CUDA's memory model; ThreadSanitizer (``--tsan``, in a process that has it
preloaded) finds the data race.

    python cuda_mutants.py [--tsan]      prints one JSON line per mutant and source
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import cuda_scenarios
import cudacpu
from cudacpu import CpuDriver, Library, launch

SANITIZE = ("-O1", "-g", "-fsanitize=thread")
LIMIT = 30  # seconds for one child; a mutant's loop may have no end

# The bounds of memory and of lists. What else is compared is data, or a constant.
_NAMES = "count|total|length|left|n|m|k|r|here|segments|pairs|world|ties|BINS|warps"
_BOUND = re.compile(
    rf"(?P<left>[\w\]\[.]+(?:\([\w, ]*\))?(?: [+*-] [\w. ]+?)*) (?P<sign><|>=) "
    rf"(?P<right>(?:to\.)?(?:{_NAMES})\b(?:\[[^\]]*\])?|length\[b\]|1 << bits|tiles\[s \+ 1\])(?! ?[-+*/(])"
)
_MINIMUM = r" \? {left} : {right}"  # equal operands give the same

# What is no fault, and what cannot be seen. They are not run.
HARMLESS = {
    **{f"block_encode.cu: b < count #{i}": "a round past the end finds no block" for i in (2, 3, 4)},
    **{f"block_server.cu: b < count #{i}": "a round past the end finds no block" for i in (2, 3, 4)},
    **{f"cast.cu: i < {n}": "a round past the end has nothing left" for n in ("n #1", "n #2", "m #1")},
    "lowrank_decode.cu: first + 32 * c < n #2": "reads an element of the padding, or of the next row, and drops it",
    "topk_compact.cu: first + j < here #1": "zeros past the end count as ties of a zero threshold, of which all fit",
    "topk_compact.cu: tile < tiles[s + 1] #1": "a round past the end counts nothing",
    "topk_compact.cu: above < k #1": "a difference of 0 either way",
    "topk_compact.cu: tile < total #2": "a tile past the end has nothing left",
    "topk_threshold.cu: s0 < segments #1": "a round past the end has no segment",
    "topk_threshold.cu: s < segments #2": "writes the total, which is then written there",
    "topk_threshold.cu: tile < total #1": "a tile past the end has nothing left",
    "topk_threshold.cu: i < here #1": "a load past the end gives zeros, which are not counted",
    "topk_threshold.cu: i < BINS #1": "a store just past shared memory is not seen (compute-sanitizer sees it)",
}

# Barriers that only CUDA's memory model needs: no order of whole threads shows that they are missing, but it is a data race.
RACES = {
    "topk_compact.cu: barrier #2",
    "topk_compact.cu: barrier #3",
    "topk_compact.cu: barrier #4",
    "topk_threshold.cu: barrier #1",
    "topk_threshold.cu: barrier #4",
}

HEAD = """
extern "C" { extern int cuda_cpu_mutant; extern char cuda_cpu_reached[256]; }
int cuda_cpu_mutant = -1;
char cuda_cpu_reached[256];
static inline int mutant(int i) { return __atomic_store_n(cuda_cpu_reached + i, 1, __ATOMIC_RELAXED), cuda_cpu_mutant == i; }
"""


def mutate(stem: str) -> tuple[str, list[str]]:
    """A source with every mutation behind a switch, and the names of the mutations: file, what, and which of several."""
    names: list[str] = []

    def name(file: str, what: str) -> int:
        same = sum(x.startswith(f"{file}: {what} #") for x in names)
        names.append(f"{file}: {what} #{same + 1}")
        return len(names) - 1

    def text_of(file: str) -> str:
        def bound(match: re.Match[str]) -> str:
            left, sign, right = match["left"], match["sign"], match["right"]
            if re.match(_MINIMUM.format(left=re.escape(left), right=re.escape(right)), match.string[match.end() :]):
                return match[0]
            # `<` lets one more through; `>=` (which zeroes what is past the end) zeroes one less.
            return f"{left} {sign} ({right}) + mutant({name(file, f'{left} {sign} {right}')})"

        def barrier(match: re.Match[str]) -> str:
            return f"if (!mutant({name(file, 'barrier')})) {match[0]}"

        lines = []
        for line in (launch.FOLDER / file).read_text().split("\n"):
            header = re.fullmatch(r'#include "(.+)"', line)
            code, slashes, comment = line.partition("//")
            code = _BOUND.sub(bound, re.sub(r"__syncthreads\(\);", barrier, code))
            lines.append(text_of(header[1]) if header else code + slashes + comment)
        return "\n".join(lines)

    body = text_of(f"{stem}.cu")
    return HEAD + body, names


class MutantDriver(CpuDriver):
    """Runs one source's mutant; the other sources are as they are."""

    def __init__(self, stem: str, mutated: Library, order: str, fenced: bool) -> None:
        super().__init__(order=order, fenced=fenced)
        self.stem, self.mutated = stem, mutated

    def library(self, stem: str) -> Library:
        return self.mutated if stem == self.stem else super().library(stem)


def in_child(stem: str, mutated: Library, number: int, orders: tuple[str, ...], fenced: bool) -> str:
    """Run the scenario with a mutant in a child; how that ended."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)
        os.close(2)  # glibc's and the assertions' complaints
        code = 0
        try:
            ctypes.c_int.in_dll(mutated.dll, "cuda_cpu_mutant").value = number
            for order in orders:
                with cudacpu.on_cpu(MutantDriver(stem, mutated, order, fenced)) as ops:
                    cuda_scenarios.SCENARIOS[stem](ops)
        except (AssertionError, RuntimeError, ValueError):
            code = 1
        except BaseException:
            code = 3
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "survived", 1: "wrong", 66: "race", -signal.SIGALRM: "hung"}.get(status, f"died {status}")


def main(tsan: bool) -> None:
    """Per source: the kernel as it is, then each mutant that its scenario reaches and no other source has found.

    Under ThreadSanitizer only those that need it.
    """
    found: set[str] = set()
    for stem in cuda_scenarios.SCENARIOS:
        text, names = mutate(stem)
        mutated = Library(text, SANITIZE if tsan else ("-O1",))
        orders = ("random",) if tsan else cudacpu.ORDERS  # a race is one in whatever order it runs
        result = in_child(stem, mutated, -1, orders, not tsan)
        print(json.dumps({"stem": stem, "mutant": "none", "result": result}), flush=True)
        reached = b"\1" * 256
        if not tsan:
            with cudacpu.on_cpu(MutantDriver(stem, mutated, "forward", False)) as ops:  # in this process
                cuda_scenarios.SCENARIOS[stem](ops)
            reached = (ctypes.c_char * 256).in_dll(mutated.dll, "cuda_cpu_reached").raw
        for number, name in enumerate(names):
            if name in found or name in HARMLESS or (name in RACES) != tsan or not reached[number]:
                continue
            result = in_child(stem, mutated, number, orders, not tsan)
            if result != "survived":
                found.add(name)
            print(json.dumps({"stem": stem, "mutant": name, "result": result}), flush=True)


def run(tsan: bool) -> list[dict[str, str]]:
    """Run this file in a process of its own; its lines."""
    root = Path(__file__).resolve().parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root.parent)])
    if tsan:
        environment["LD_PRELOAD"] = sanitizer() or ""
        environment["TSAN_OPTIONS"] = "exitcode=66 halt_on_error=1"
    command = [sys.executable, __file__, *(["--tsan"] if tsan else [])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", timeout=270)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def found_in(rows: list[dict[str, str]]) -> dict[str, bool]:
    """Per mutant that ran: whether it was found with one of the sources that reach it."""
    results: dict[str, bool] = {}
    for row in rows:
        if row["mutant"] != "none":
            results[row["mutant"]] = results.get(row["mutant"], False) or row["result"] != "survived"
    return results


@functools.cache
def sanitizer() -> str | None:
    """The library to preload for kernels compiled with ThreadSanitizer, if this machine has one that works."""
    if cudacpu.COMPILER is None:
        return None
    command = [cudacpu.COMPILER, "-print-file-name=libtsan.so"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not (os.path.isabs(path) and os.path.exists(path)):
        return None
    # older ones refuse kernels that place memory at more random addresses than they expect
    probe = [sys.executable, "-c", "pass"]
    works = subprocess.run(probe, env={**os.environ, "LD_PRELOAD": path}, capture_output=True).returncode == 0
    return path if works else None


if __name__ == "__main__":
    main("--tsan" in sys.argv)
