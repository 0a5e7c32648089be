"""How much memory and how many CPUs this process may use: the machine's, cut by the control groups (v1 and v2) that hold
the process.

Sources: proc(5), cgroups(7), sched(7), and the kernel's admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and
scheduler/sched-bwc.rst. Knows nothing of models, caches or threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec


class _MemoryFiles(msgspec.Struct, frozen=True):
    """Names of the files in which one cgroup version tells a group's memory."""

    limit: str
    usage: str
    reclaimable: str
    """Key in memory.stat of page cache not used lately, subtree included."""


_MEMORY_FILES = {
    1: _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _MemoryFiles("memory.max", "memory.current", "inactive_file"),
}
"""By cgroup version."""


def cpu_count(root: Path = Path("/")) -> int:
    """CPUs this process may use: those of its affinity, or as many as the least quota of the groups above it pays for.

    A fraction of a CPU counts as one. `root` is the directory under which proc and sys are found (tests give their own).
    """
    usable = len(os.sched_getaffinity(0))
    for group, version in _groups(root, "cpu"):
        quota = _cpu_quota(group, version)
        if quota is not None:
            usable = min(usable, math.ceil(quota))
    return max(1, usable)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still take without swapping or being killed.

    It is the least of the machine's MemAvailable and, for each control group above the process, limit minus use.
    Page cache not used lately counts as free. `root` as above.
    """
    free = _meminfo(root)["MemAvailable"]
    for group, version in _groups(root, "memory"):
        files = _MEMORY_FILES[version]
        limit, usage = _number(group / files.limit), _number(group / files.usage)
        if limit is not None and usage is not None:
            usage -= min(usage, _stat(group / "memory.stat", files.reclaimable))
            free = min(free, max(0, limit - usage))
    return free


def total_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory of the machine, or the smallest limit of the groups above this process. `root` as above."""
    limits = [_number(group / _MEMORY_FILES[version].limit) for group, version in _groups(root, "memory")]
    return min([_meminfo(root)["MemTotal"], *(limit for limit in limits if limit is not None)])


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = (line.split() for line in lines)
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in fields if len(parts) == 3}


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """(directory, cgroup version) of this process's groups of a controller, leaf first, up to the hierarchy's mount point."""
    for line in _lines(root / "proc/self/cgroup"):
        identifier, controllers, path = line.split(":", 2)
        if identifier == "0" and not controllers:
            version = 2
        elif controller in controllers.split(","):
            version = 1
        else:
            continue
        for mount_root, mount_point in _mounts(root, controller, version):
            point = root / mount_point.lstrip("/")
            # A container without a cgroup namespace names the group from the host's root but mounts only its own
            # subtree. One that lies elsewhere ("/../x") cannot be seen; then the mounted group is the best there is.
            group = PurePosixPath(path)
            inside = group.is_relative_to(mount_root) and ".." not in group.parts
            leaf = point / group.relative_to(mount_root) if inside else point
            for directory in (leaf, *leaf.parents):
                yield directory, version
                if directory == point:
                    break


def _mounts(root: Path, controller: str, version: int) -> Iterator[tuple[str, str]]:
    """(root within the hierarchy, mount point) of the hierarchy's mounts."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        fields, (kind, *rest) = mount.split(), filesystem.split()
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in rest[-1].split(","):
            yield fields[3], fields[4]


def _cpu_quota(group: Path, version: int) -> float | None:
    """CPUs that a group's bandwidth limit allows; None without one."""
    if version == 2:
        words = " ".join(_lines(group / "cpu.max")).split()
        quota, period = (int(word) if word.isdecimal() else None for word in (*words, "", "")[:2])
    else:
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The file's number; None when there is no such file (root groups have none) or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat(path: Path, key: str) -> int:
    values = dict(line.split(" ", 1) for line in _lines(path) if " " in line)
    return int(values.get(key, "0"))
