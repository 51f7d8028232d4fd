"""The memory of this machine.  No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or less under the limit of a cgroup."""
    limits = []
    try:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        pass
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = Path("/sys/fs/cgroup", name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            limits.append(int(text))
    return min(filter(None, limits), default=16 * 2**30)


def available_memory() -> int:
    """Return the bytes that can be used now without swapping, within a cgroup's limit."""
    total = machine_memory()
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        match = None
    return min(total, 1024 * int(match[1])) if match else total
