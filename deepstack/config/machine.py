"""Memory and cores that this process may use, within the limits of its control groups.

Slurm, systemd and containers limit a group (cgroup) of processes.  A limit of any group above
the process's own counts too.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or less under the limit of a control group."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in control_groups("memory"):
        limits += numbers(group / "memory.max") + numbers(group / "memory.limit_in_bytes")
    return min(limits)


def available_memory() -> int:
    """Return the bytes that can be used now without swapping, within all limits.

    Of a limited control group, pages of files that it has not used lately count as free.
    """
    total = machine_memory()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", content(Path("/proc/meminfo")), re.M)
    free = [total, *([1024 * int(match[1])] if match else [])]
    for group in control_groups("memory"):
        limits = numbers(group / "memory.max") + numbers(group / "memory.limit_in_bytes")
        used = numbers(group / "memory.current") + numbers(group / "memory.usage_in_bytes")
        if limits and used and limits[0] <= total:
            stat = content(group / "memory.stat")
            idle = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.M)
            free.append(max(0, limits[0] - used[0] + max(map(int, idle), default=0)))
    return min(free)


def cores() -> int:
    """Return the number of cores that this process may use: by affinity, and by a quota of time.

    A quota that is not a whole number of cores is rounded down, to one core at least.
    """
    affinity = hasattr(os, "sched_getaffinity")
    counts = [(len(os.sched_getaffinity(0)) if affinity else os.cpu_count()) or 1]
    for group in control_groups("cpu"):
        quota = numbers(group / "cpu.max") or [
            *numbers(group / "cpu.cfs_quota_us"),
            *numbers(group / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[1]:  # "max" and -1: no limit
            counts.append(max(1, quota[0] // quota[1]))
    return min(counts)


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all groups above it.

    Version 1 has a tree for each controller, as "4:memory:/a/b" says; version 2 has one for all,
    "0::/a/b".  In a container the path may lie outside of the mounted tree; then the root of the
    mount, which is the last folder, is the container's group.
    """
    for line in content(OWN_GROUPS).splitlines():
        number, names, path = [*line.split(":", 2), "", ""][:3]
        if controller in names.split(","):
            roots = [MOUNT / controller, MOUNT / names]
        elif number == "0" and not names:
            roots = [MOUNT, MOUNT / "unified"]
        else:
            continue
        own = Path(*(part for part in Path(path).parts if part not in ("/", "..")))
        for root in dict.fromkeys(roots):
            yield from (root / group for group in (own, *own.parents))


def numbers(path: Path) -> list[int]:
    """Return the numbers in a file of a control group; none if one of its words is not a number."""
    words = content(path).split()
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else []


def content(path: Path) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
