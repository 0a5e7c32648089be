"""`octavo doctor`: what this machine offers, and what octavo makes of it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.errors import ConfigError
from octavo.obs.machine import cpu_count

_CPU_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
)
_PACKAGES = (
    "numpy",
    "tokenizers",
    "jinja2",
    "msgspec",
    "starlette",
    "uvicorn",
    "httptools",
    "uvloop",
    "huggingface-hub",
)


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("doctor", help="show what this machine offers", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="port to look at (default 8000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints facts and problems. Returns 1 when something would keep the server from running well."""
    facts, problems = examine(arguments.port)
    if arguments.json:
        print(json.dumps({"facts": facts, "problems": problems}, indent=2))
        return int(bool(problems))
    for name, value in facts.items():
        print(f"{name:<22} {value}")
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        print("no problems found")
    return int(bool(problems))


def examine(port: int) -> tuple[dict[str, str], list[str]]:
    """(facts, problems). Raises ConfigError for a port that cannot exist."""
    from octavo.loaders.catalogue import CATALOGUE, cache_folder
    from octavo.obs.machine import free_memory_bytes, total_memory_bytes

    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}; it must be 0 to 65535", param="port")
    problems: list[str] = []
    facts = {
        "octavo": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpus usable": f"{cpu_count()} of {os.cpu_count()}",
        "cpu features": " ".join(_cpu_features()) or "none of those octavo looks for",
    }
    try:
        from octavo.backends.cpu import _native

        facts["native builds"] = " ".join(_native.available_isas())
        facts["build chosen"] = _native.isa()
    except ValueError as error:
        problems.append(f"{error}; unset OCTAVO_ISA to take the fastest")
    except (ImportError, RuntimeError) as error:
        problems.append(f"the native backend does not load ({error}); reinstall octavo, or use --backend numpy")
    free, total = free_memory_bytes(), total_memory_bytes()
    facts["memory"] = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    if free < 2**30:
        problems.append(f"only {free / 2**20:.0f} MiB of memory are free; the default model needs about 400 MiB")
    facts["transparent huge pages"] = _read("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown"
    facts[f"port {port}"] = "free" if _port_free(port) else "in use"
    if facts[f"port {port}"] == "in use":
        problems.append(f"port {port} is in use; choose another with --port")
    folder = cache_folder()
    cached = [name for name in CATALOGUE if (folder / CATALOGUE[name].file_name).is_file()]
    facts["model cache"] = f"{folder} ({', '.join(cached) or 'empty'})"
    facts["packages"] = " ".join(f"{name} {_package(name)}" for name in _PACKAGES)
    return facts, problems


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _cpu_features() -> list[str]:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            return [feature for feature in _CPU_FEATURES if feature in flags]
    return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
