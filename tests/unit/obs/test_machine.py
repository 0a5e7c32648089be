"""Memory and CPUs this process may use, on made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.obs.machine import cpu_count, free_memory_bytes, total_memory_bytes

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


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("leaf", "parent", "expected"),
    [
        ("max 100000", "max 100000", 8),
        ("200000 100000", "max 100000", 2),
        ("max 100000", "150000 100000", 2),
        ("20000 100000", "max 100000", 1),
        ("3000000 100000", "max 100000", 8),
        ("nonsense", "300000 100000", 3),
    ],
)
def test_cpus_of_a_v2_quota(tmp_path: Path, eight_cpus: None, leaf: str, parent: str, expected: int) -> None:
    root = make_root(
        tmp_path,
        cgroup="0::/user/app\n",
        mountinfo=V2_MOUNT,
        files={"sys/fs/cgroup/user/app/cpu.max": f"{leaf}\n", "sys/fs/cgroup/user/cpu.max": f"{parent}\n"},
    )
    assert cpu_count(root) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 8), (250_000, 3), (50_000, 1)])
def test_cpus_of_a_v1_quota(tmp_path: Path, eight_cpus: None, quota: int, expected: int) -> None:
    group = "sys/fs/cgroup/cpu,cpuacct/app"
    root = make_root(
        tmp_path,
        cgroup="5:cpuset:/x\n4:cpu,cpuacct:/app\n",
        mountinfo="35 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n",
        files={f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"},
    )
    assert cpu_count(root) == expected


def test_cpus_without_groups_are_the_affinity(tmp_path: Path, eight_cpus: None) -> None:
    assert cpu_count(make_root(tmp_path, cgroup="", mountinfo="", files={})) == 8
    assert cpu_count(tmp_path / "nothing here") == 8


def test_this_machine() -> None:
    assert cpu_count() >= 1
    assert 0 < free_memory_bytes() <= total_memory_bytes()
