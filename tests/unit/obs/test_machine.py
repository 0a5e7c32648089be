"""Memory this process may use, on made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

from octavo.obs.machine import free_memory_bytes, total_memory_bytes

MIB = 1024 * 1024


def make_root(root: Path, *, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    meminfo = f"MemTotal: {16 * 1024 * 1024} kB\nMemAvailable:  {8 * 1024 * 1024} kB\nHugePages_Total:  0\n"
    contents = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **files}
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2_MOUNT = "24 30 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def test_without_groups_it_is_the_machine(tmp_path: Path) -> None:
    root = make_root(tmp_path, cgroup="", mountinfo="", files={})
    assert free_memory_bytes(root) == 8 * 1024 * MIB
    assert total_memory_bytes(root) == 16 * 1024 * MIB


def test_v2_limit_minus_use_with_stale_cache_as_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user/app"
    root = make_root(
        tmp_path,
        cgroup="0::/user/app\n",
        mountinfo=V2_MOUNT,
        files={
            f"{group}/memory.max": f"{1000 * MIB}\n",
            f"{group}/memory.current": f"{700 * MIB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {200 * MIB}\nactive_file 5\n",
        },
    )
    assert free_memory_bytes(root) == 500 * MIB
    assert total_memory_bytes(root) == 1000 * MIB


def test_v2_parent_limit_counts_and_max_does_not(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        cgroup="0::/user/app\n",
        mountinfo=V2_MOUNT,
        files={
            "sys/fs/cgroup/user/app/memory.max": "max\n",
            "sys/fs/cgroup/user/app/memory.current": f"{10 * MIB}\n",
            "sys/fs/cgroup/user/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/user/memory.current": f"{130 * MIB}\n",
        },
    )
    assert free_memory_bytes(root) == 0
    assert total_memory_bytes(root) == 100 * MIB


def test_v1_container_that_mounts_only_its_subtree(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    root = make_root(
        tmp_path,
        cgroup="5:cpuset:/docker/abc\n4:memory:/docker/abc\n",
        mountinfo=V1_MOUNT.format(root="/docker/abc"),
        files={
            f"{group}/memory.limit_in_bytes": f"{2048 * MIB}\n",
            f"{group}/memory.usage_in_bytes": f"{48 * MIB}\n",
            f"{group}/memory.stat": f"inactive_file 7\ntotal_inactive_file {8 * MIB}\n",
        },
    )
    assert free_memory_bytes(root) == 2008 * MIB
    assert total_memory_bytes(root) == 2048 * MIB


def test_v1_unlimited_is_the_machine(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        cgroup="4:memory:/a\n0::/\n",
        mountinfo=V1_MOUNT.format(root="/"),
        files={
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1\n",
        },
    )
    assert free_memory_bytes(root) == 8 * 1024 * MIB


def test_group_outside_the_mount_falls_back_to_the_mounted_one(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        cgroup="0::/../elsewhere\n",
        mountinfo=V2_MOUNT,
        files={"sys/fs/cgroup/memory.max": f"{64 * MIB}\n", "sys/fs/cgroup/memory.current": f"{4 * MIB}\n"},
    )
    assert free_memory_bytes(root) == 60 * MIB


def test_this_machine() -> None:
    assert 0 < free_memory_bytes() <= total_memory_bytes()
