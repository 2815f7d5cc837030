"""How many threads the kernels get by default."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads for calls of one token (`decode`) and for larger batches (`batch`)."""

    decode: int
    batch: int


def default_threads(root: Path = Path("/")) -> Threads:
    """One thread a physical core this process may run on, within its container's CPU quota.

    llama.cpp's threads wait for each other by spinning, so a thread too many costs more than it brings: hyperthread
    siblings share the unit that is the bottleneck, and a quota stops all threads while one spins.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(root, cpu) for cpu in allowed}
    count = max(1, min(len(cores), _quota(root)))
    return Threads(count, count)


def _siblings(root: Path, cpu: int) -> str:
    """Which hyperthreads share this CPU's core, as the kernel writes it; the CPU itself where nothing is known."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(root: Path) -> int:
    """Whole CPUs of the cgroup's quota (version 2), rounded down; no limit where there is none."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # absent, or "max 100000"
        return 1 << 16
