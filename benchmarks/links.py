"""Ranks of one machine as hosts on a network: a namespace for each, joined by links of a chosen speed.

    import links

    if __name__ == "__main__":
        links.isolate()                                  # needs root; from here on in namespaces of its own
        with links.star(ranks=2, gigabits=1.0) as star:
            star.launch([sys.executable, "worker.py"], on_line=print)

A star of veth pairs around a bridge, with a token bucket (tbf) at both ends of each link, so that a rank sends and receives
at most that fast. :func:`star` refuses to build anything outside :func:`isolate`: within it, processes, mounts and interfaces
belong to namespaces that the kernel removes with their last process. Hence nothing is left behind whatever happens to the
benchmark (Ctrl-C, SIGTERM, SIGKILL, a crash), and the machine's own network is never touched.

Needs Linux, root, and the programs ip, tc (iproute2), unshare and setpriv (util-linux). Latency needs the kernel's netem.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import IO

_INSIDE = "GRADCOMP_ISOLATED"
_UNSHARE = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
_PORT = 29500
_PATIENCE = 5.0  # seconds for the other ranks to end after one has failed
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Every rank's environment: glibc keeps freed memory, and in huge pages. By default it gives freed gradients back to the system
or does not, depending on what was allocated before; page faults then add 7 to 17 ms to a step of 46 to 52."""
CPU_LIMITED = 10.0
"""Gb/s from which on the processor limits what ranks on one small machine exchange, not the link."""


class LinksError(RuntimeError):
    """The links cannot be made on this machine, or a rank failed."""


def why_not(latency: bool = False) -> str | None:
    """Why this machine cannot join ranks by shaped links (with ``latency``: delayed ones); None if it can."""
    missing = [name for name in ("ip", "tc", "unshare", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"needs the programs {', '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces: run it with sudo, or in a container with --privileged"
    probe = "ip link add end0 type veth peer name end1 && ip link add switch type bridge && tc qdisc add dev end0 root "
    kinds = [("tbf", "tbf rate 1gbit burst 128kb latency 20ms")] + [("netem", "netem delay 1ms")] * latency
    for name, qdisc in kinds:
        done = _quiet([*_UNSHARE, "--mount-proc", "sh", "-c", probe + qdisc])
        if done.returncode:
            said = done.stderr.strip().splitlines()
            lacking = "so latency cannot be emulated here" if name == "netem" else "so links cannot be shaped"
            return f"this kernel or container refuses {name}, {lacking} ({said[-1] if said else 'no reason given'})"
    return None


def isolate(latency: bool = False) -> None:
    """Run this program again in namespaces of its own and exit with its status; returns at once inside them.

    Raises:
        LinksError: this machine cannot; the message says why.
    """
    if os.environ.get(_INSIDE):
        sys.excepthook = _report_interrupt
        return
    reason = why_not(latency)
    if reason is not None:
        raise LinksError(reason)
    command = [*_UNSHARE, "--mount-proc", sys.executable, *sys.orig_argv[1:]]
    # When this process dies, of whatever signal, so does unshare, and with it everything inside.
    process = subprocess.Popen(command, env={**os.environ, _INSIDE: "1"})
    while True:
        try:
            sys.exit(process.wait())
        except KeyboardInterrupt:  # the terminal has sent it to those inside as well
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            sys.exit(128 + signal.SIGINT)


def _report_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted; ranks and links are gone", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


@dataclass(frozen=True)
class Host:
    """One rank's end of its link."""

    namespace: str
    interface: str
    address: str

    @property
    def enter(self) -> list[str]:
        """What to put before a command that is to run here."""
        return ["ip", "netns", "exec", self.namespace]


class Star:
    """Hosts around a switch; made by :func:`star`."""

    def __init__(self, ranks: int) -> None:
        self.hosts = [Host(f"host{i}", f"eth{i}", f"10.77.0.{i + 1}") for i in range(ranks)]
        _run("mount -t tmpfs tmpfs /run", "ip link add switch type bridge", "ip link set switch up")
        for i, host in enumerate(self.hosts):
            _run(
                f"ip netns add {host.namespace}",
                f"ip link add port{i} type veth peer name {host.interface} netns {host.namespace}",
                f"ip link set port{i} master switch up",
                f"ip -n {host.namespace} address add {host.address}/24 dev {host.interface}",
                f"ip -n {host.namespace} link set {host.interface} up",
                f"ip -n {host.namespace} link set lo up",
                # every kernel has it; bbr, the default of some, is slow to find out the rate of a bucket as short as these
                f"ip netns exec {host.namespace} sysctl -qw net.ipv4.tcp_congestion_control=reno",
            )

    def shape(self, gigabits: float, latency_ms: float = 0.0) -> None:
        """Limit every link to ``gigabits`` per second each way, 0: not at all; ``latency_ms``: from rank to rank, one way."""
        # A bucket this large lets 64 kB packets through in one piece; a larger one would let small messages pass for free.
        rate = f"rate {round(gigabits * 1e6)}kbit burst {max(64, round(128 * gigabits))}kb latency 50ms"
        for i, host in enumerate(self.hosts):
            for command, device in (("tc", f"port{i}"), (f"tc -n {host.namespace}", host.interface)):
                _quiet(f"{command} qdisc del dev {device} root".split())
                if not gigabits:
                    continue
                if latency_ms:
                    _run(
                        f"{command} qdisc add dev {device} root handle 1: netem delay {latency_ms / 2:g}ms limit 100000",
                        f"{command} qdisc add dev {device} parent 1: tbf {rate}",
                    )
                else:
                    _run(f"{command} qdisc add dev {device} root tbf {rate}")

    def launch(
        self,
        command: Sequence[str],
        on_line: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Run ``command`` as one rank per host, with torchrun's variables; ``on_line`` gets each line rank 0 prints.

        Raises:
            LinksError: a rank failed, or they took longer than ``timeout`` seconds; with what it wrote to stderr.
        """
        processes: list[subprocess.Popen[str]] = []
        with ExitStack() as stack:
            logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in self.hosts]
            try:
                for rank, host in enumerate(self.hosts):
                    processes.append(
                        subprocess.Popen(
                            [*host.enter, *command],
                            env={**os.environ, **ALLOCATOR, **(environment or {}), **self._variables(rank)},
                            stdout=logs[rank] if rank else subprocess.PIPE, stderr=logs[rank], text=True,
                        )
                    )  # fmt: skip
                for line in _lines(processes, time.monotonic() + timeout):
                    on_line(line)
                failed = [rank for rank, process in enumerate(processes) if process.poll() != 0]
                if failed:
                    raise LinksError(_report(failed, processes, logs, timeout))
            finally:
                for process in processes:
                    process.kill()
                    process.wait()

    def _variables(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "WORLD_SIZE": str(len(self.hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": self.hosts[rank].interface,
        }  # fmt: skip


@contextmanager
def star(ranks: int, gigabits: float, latency_ms: float = 0.0) -> Iterator[Star]:
    """``ranks`` hosts, each on a link of ``gigabits`` per second; one star at a time, and only inside :func:`isolate`."""
    if not os.environ.get(_INSIDE):
        raise LinksError("call links.isolate() first: it keeps the links apart from this machine's network")
    made = Star(ranks)
    try:
        made.shape(gigabits, latency_ms)
        yield made
    finally:
        for i, host in enumerate(made.hosts):
            _run(f"ip link delete port{i}", f"ip netns delete {host.namespace}")
        _run("ip link delete switch", "umount --lazy /run")


def _lines(processes: Sequence[subprocess.Popen[str]], deadline: float) -> Iterator[str]:
    """What the first process prints, until all have ended, one has failed, or the time is up."""
    stream: IO[str] | None = processes[0].stdout
    assert stream is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            states = [process.poll() for process in processes]  # before reading: what they have said is read below
            wait = 0.2 if None in states else 0.0
            while time.monotonic() < deadline and selector.get_map() and selector.select(wait):
                chunk = os.read(stream.fileno(), 1 << 16)
                if not chunk:
                    selector.unregister(stream)
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode() for line in lines)
            if None not in states:  # a daemon that a rank has left may hold the stream open
                return
            if not selector.get_map():
                time.sleep(0.05)
            if any(states):
                deadline = min(deadline, time.monotonic() + _PATIENCE)


def _report(
    failed: Sequence[int], processes: Sequence[subprocess.Popen[str]], logs: Sequence[IO[str]], timeout: float
) -> str:
    said = []
    for rank in failed:
        logs[rank].seek(0)
        state = processes[rank].poll()
        how = f"exit code {state}" if state is not None else f"still running (time limit {timeout:g} s)"
        said.append(f"rank {rank}: {how}\n{logs[rank].read()[-2000:]}")
    return "\n".join(said)


def _quiet(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run(*commands: str) -> None:
    for command in commands:
        done = _quiet(command.split())
        if done.returncode:
            raise LinksError(f"{command}: {done.stderr.strip()}")
