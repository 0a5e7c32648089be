"""How much memory this process may use: the machine's, cut by the control groups (v1 and v2) that hold the process.

Sources: proc(5), cgroups(7), and the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst. Knows nothing of
models or caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec


class _Hierarchy(msgspec.Struct, frozen=True):
    """Names of the files in which one cgroup version tells a group's memory."""

    limit: str
    usage: str
    reclaimable: str
    """Key in memory.stat of page cache not used lately, subtree included."""


_V1 = _Hierarchy("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Hierarchy("memory.max", "memory.current", "inactive_file")


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still take without swapping or being killed.

    It is the least of the machine's MemAvailable and, for each control group above the process, limit minus use.
    Page cache not used lately counts as free. `root` is the directory under which proc and sys are found (tests
    give their own).
    """
    free = _meminfo(root)["MemAvailable"]
    for group, files in _groups(root):
        limit, usage = _number(group / files.limit), _number(group / files.usage)
        if limit is not None and usage is not None:
            usage -= min(usage, _stat(group / "memory.stat", files.reclaimable))
            free = min(free, max(0, limit - usage))
    return free


def total_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory of the machine, or the smallest limit of the groups above this process. `root` as above."""
    limits = [_number(group / files.limit) for group, files in _groups(root)]
    return min([_meminfo(root)["MemTotal"], *(limit for limit in limits if limit is not None)])


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = (line.split() for line in lines)
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in fields if len(parts) == 3}


def _groups(root: Path) -> Iterator[tuple[Path, _Hierarchy]]:
    """Directories of the memory-controlling groups of this process, leaf first, up to the hierarchy's mount point."""
    for line in _lines(root / "proc/self/cgroup"):
        identifier, controllers, path = line.split(":", 2)
        if identifier == "0" and not controllers:
            files = _V2
        elif "memory" in controllers.split(","):
            files = _V1
        else:
            continue
        for mount_root, mount_point in _mounts(root, files):
            point = root / mount_point.lstrip("/")
            # A container without a cgroup namespace names the group from the host's root but mounts only its own
            # subtree. One that lies elsewhere ("/../x") cannot be seen; then the mounted group is the best there is.
            group = PurePosixPath(path)
            inside = group.is_relative_to(mount_root) and ".." not in group.parts
            leaf = point / group.relative_to(mount_root) if inside else point
            for directory in (leaf, *leaf.parents):
                yield directory, files
                if directory == point:
                    break


def _mounts(root: Path, files: _Hierarchy) -> Iterator[tuple[str, str]]:
    """(root within the hierarchy, mount point) of the hierarchy's mounts."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        fields, (kind, *rest) = mount.split(), filesystem.split()
        if kind == ("cgroup2" if files is _V2 else "cgroup") and (files is _V2 or "memory" in rest[-1].split(",")):
            yield fields[3], fields[4]


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
