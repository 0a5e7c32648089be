"""Result files: where and under which name they lie, and the machine and commit that each must tell. Measures nothing itself."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import octavo
from octavo.errors import ConfigError
from octavo.obs.machine import cpu_count

RESULTS_FOLDER = Path("benchmarks/results")
QUIET_LOAD = 0.5
"""Load average (1 minute) above which a machine is not quiet enough to measure on."""


def load_average() -> float:
    """Runnable and running processes, averaged over the last minute."""
    return os.getloadavg()[0]


def machine() -> dict[str, Any]:
    """Facts of this machine that a speed depends on. Sizes in bytes."""
    info = _cpu_info()
    return {
        "name": machine_name(),
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model_stepping": [info.get(key) for key in ("cpu family", "model", "stepping")],
        "cpus": cpu_count(),
        "l2_bytes": cache_bytes(2),
        "l3_bytes": cache_bytes(3),
        "transparent_huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def machine_name() -> str:
    """CPU model and usable CPUs, fit for a file name."""
    model = _cpu_info().get("model name", platform.machine())
    words = re.sub(r"\((r|tm)\)|@.*|\bcpu\b|\bprocessor\b", " ", model.lower())
    return f"{re.sub('[^a-z0-9]+', '-', words).strip('-')}-{cpu_count()}cpu"


def cache_bytes(level: int) -> int | None:
    """Size of the data cache of a level as CPU 0 sees it; None where the system does not tell."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if _read(index / "level") == str(level) and _read(index / "type") in ("Data", "Unified"):
            match = re.fullmatch(r"(\d+)([KM])", _read(index / "size"))
            return None if match is None else int(match[1]) * {"K": 1 << 10, "M": 1 << 20}[match[2]]
    return None


def commit() -> str:
    """Short commit of the sources that run, with `-dirty` when files differ from it; the version when they are not in a repository."""
    folder = Path(octavo.__file__).resolve().parent
    try:
        root = _git(folder, "rev-parse", "--show-toplevel")
        if folder != Path(root) / "src" / "octavo":
            return f"v{octavo.__version__}"
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", f"{root}/src", f"{root}/native")
        return _git(folder, "rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return f"v{octavo.__version__}"


def header(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What every result begins with."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "kind": kind,
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": machine(),
        "options": dict(options),
        "load_before": load_average(),
    }


def write(result: Mapping[str, Any], path: Path | None = None, folder: Path = RESULTS_FOLDER) -> Path:
    """Writes a result to `path`, or into `folder` under date, machine, commit, `variant` if it has one, and kind; an earlier one of
    that name stays.

    Returns the path. Raises ConfigError when it cannot be written.
    """
    try:
        if path is None:
            folder.mkdir(parents=True, exist_ok=True)
            stem = f"{result['date'][:10]}-{result['machine']['name']}-{result['commit']}"
            stem += f"-{result['variant']}" if "variant" in result else ""
            path, number = folder / f"{stem}-{result['kind']}.json", 1
            while path.exists():
                number += 1
                path = folder / f"{stem}-{number}-{result['kind']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the result cannot be written: {error}; choose another place with --json") from None
    return path


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    lines = _read("/proc/cpuinfo").partition("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
