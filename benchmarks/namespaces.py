"""Network namespaces joined by a bridge, each limited to a rate both ways: real TCP over a real bottleneck. Root on Linux only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

SUBNET = "10.77.0."
FIRST_HOST = 10
BURST = "64kb"
QUEUE = "200ms"
"""How long a packet may wait in the queue of a link before it is dropped: that of a home router."""


def available() -> bool:
    """Return whether namespaces can be made here."""
    if os.name != "posix" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    probe = f"roost-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return False
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return True


@dataclass(frozen=True, kw_only=True)
class Namespaces:
    """`count` hosts with an interface eth0 each; a context manager that makes and removes them."""

    count: int
    mbit: float
    """Rate of every host's uplink and downlink."""

    def name(self, host: int) -> str:
        """Return the namespace of a host."""
        return f"roost-{os.getpid()}-{host}"

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"{SUBNET}{FIRST_HOST + host}"

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs `arguments` on a host."""
        return ["ip", "netns", "exec", self.name(host), *arguments]

    @property
    def _switch(self) -> str:
        return f"roost-{os.getpid()}-switch"

    def __enter__(self) -> Namespaces:
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge0", "up")
            for host in range(self.count):
                self._add(host)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _add(self, host: int) -> None:
        inside, outside, port = self.name(host), self._switch, f"port{host}"
        _run("ip", "netns", "add", inside)
        _run("ip", "-n", outside, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", inside)
        _run("ip", "-n", inside, "link", "set", "lo", "up")
        _run("ip", "-n", inside, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        _run("ip", "-n", inside, "link", "set", "eth0", "up")
        _run("ip", "-n", outside, "link", "set", port, "master", "bridge0", "up")
        for namespace, device in ((inside, "eth0"), (outside, port)):
            limit = ("tbf", "rate", f"{self.mbit:g}mbit", "burst", BURST, "latency", QUEUE)
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)

    def _remove(self) -> None:
        for namespace in (*(self.name(host) for host in range(self.count)), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
