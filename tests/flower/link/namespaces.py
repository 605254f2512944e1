"""Machines of their own on this one: network namespaces, joined to a hub by links with a limited rate."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

HUB_ADDRESS = "10.126.0.1"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def name_of(machine: str) -> str:
    return f"fedtailor{os.getpid()}{machine}"


@contextmanager
def inside(machine: str) -> Iterator[None]:
    """In this block the thread, and what it starts, is on another machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{name_of(machine)}", os.O_RDONLY)
    try:
        if libc.setns(there, NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        yield
    finally:
        libc.setns(home, NEW_NETWORK)
        os.close(home)
        os.close(there)


def cut_off(machine: str, cut: bool) -> None:
    """Pull the plug of a machine, on the hub's side, or put it in again."""
    ip("-n", name_of("hub"), "link", "set", f"to-{machine}", "down" if cut else "up")


@contextmanager
def machines(names: list[str], rate: str) -> Iterator[None]:
    """A hub and other machines; what passes between them is held to ``rate``, in both directions."""
    with ExitStack() as stack:
        try:
            for machine in ("hub", *names):
                ip("netns", "add", name_of(machine))
                stack.callback(ip, "netns", "del", name_of(machine))
                ip("-n", name_of(machine), "link", "set", "lo", "up")
            ip("-n", name_of("hub"), "addr", "add", f"{HUB_ADDRESS}/32", "dev", "lo")
            for number, machine in enumerate(names, 1):
                _join(machine, number, rate)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", b"") or str(error).encode()
            pytest.skip(f"network namespaces cannot be made here: {told.decode().strip()}")
        yield


def _join(machine: str, number: int, rate: str) -> None:
    hub, other, near = name_of("hub"), name_of(machine), f"to-{machine}"
    ip("-n", hub, "link", "add", near, "type", "veth", "peer", "name", "uplink", "netns", other)
    for space, device, address in ((hub, near, 1), (other, "uplink", 2)):
        ip("-n", space, "addr", "add", f"10.126.{number}.{address}/30", "dev", device)
        ip("-n", space, "link", "set", device, "up")
        limit = ["root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"]
        subprocess.run(
            ["tc", "-n", space, "qdisc", "add", "dev", device, *limit],
            check=True,
            capture_output=True,
            timeout=20,
        )
    ip("-n", other, "route", "add", HUB_ADDRESS, "via", f"10.126.{number}.1")


def passed(machine: str) -> tuple[int, int]:
    """Bytes that have left a machine, and that have reached it, as the kernel counts them."""
    with inside(machine):
        lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith("uplink:"))
    return int(fields[8]), int(fields[0])
