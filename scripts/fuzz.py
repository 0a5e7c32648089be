"""Random requests, right and wrong, to all endpoints of a real server, made from its own OpenAPI document; a quarter of the clients leave.

    python scripts/fuzz.py --minutes 10          # writes benchmarks/results/<date>-<machine>-<commit>-fuzz.json
    python scripts/fuzz.py --minutes 0.4 --no-result

Fails (exit status 1) when the server answers with a 5xx, when an answer is no JSON or an error has not its shape, when a known answer
changes, when work or KV blocks are left, or when threads, file descriptors or memory grow.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import http.client
import json
import random
import re
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Live, growth, known_answer, live, observe, write_result

from octavo.bench import results
from support.fuzz_requests import Fuzz, Generator

CLIENTS = 8
ALLOWED = frozenset({200, 400, 401, 403, 404, 405, 409, 413, 415, 429, 431})


def send(server: Live, fuzz: Fuzz) -> socket.socket:
    """Sends a request as it is, whatever is wrong with it."""
    connection = socket.create_connection((server.host, server.port), timeout=60)
    headers = {"host": "localhost", "connection": "close", **fuzz.headers}
    if fuzz.body is not None:
        headers["content-length"] = str(len(fuzz.body))
    lines = [f"{fuzz.method} {fuzz.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    connection.sendall("\r\n".join(lines).encode() + (fuzz.body or b""))
    return connection


def judge(fuzz: Fuzz, status: int, kind: str, answer: bytes) -> str | None:
    """What is wrong with an answer, None when nothing is."""
    allowed = ALLOWED | ({504} if fuzz.has_deadline else frozenset())
    if status not in allowed:
        return f"status {status}: {answer[:300]!r}"
    if fuzz.method == "HEAD":
        return None
    if kind.startswith("text/event-stream"):
        if b'"error":{' in answer and not fuzz.has_deadline:
            return f"an error in the middle of a stream: {answer[-300:]!r}"
        return None if answer.endswith(b"\n\n") else f"a stream that ends in the middle: {answer[-100:]!r}"
    if not kind.startswith("application/json"):
        return None
    try:
        value = json.loads(answer, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return f"no JSON: {answer[:300]!r}"
    if status != 200 and not {"message", "type", "param", "code"} <= value.get("error", {}).keys():
        return f"an error without its shape: {answer[:300]!r}"
    return None


def client(
    server: Live, generator: Generator, dice: random.Random, until: float
) -> tuple[collections.Counter[str], list[str]]:
    """Sends requests one after another."""
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    while time.monotonic() < until and len(faults) < 5:
        fuzz = generator.request()
        connection = send(server, fuzz)
        try:
            if dice.random() < 0.25:
                time.sleep(dice.random() * 0.2)
                counts["left"] += 1
                continue
            reply = http.client.HTTPResponse(connection, method=fuzz.method)
            reply.begin()
            answer = reply.read()
        except (OSError, http.client.HTTPException) as error:
            faults.append(f"{fuzz.method} {fuzz.path} {fuzz.body and fuzz.body[:400]!r}: {error!r}")
            continue
        finally:
            connection.close()
        counts[str(reply.status)] += 1
        counts[re.sub(r"resp_[0-9a-f]+", "{id}", fuzz.path) + " 200"] += reply.status == 200
        kind = reply.headers.get("content-type", "")
        if fault := judge(fuzz, reply.status, kind, answer):
            faults.append(f"{fuzz.method} {fuzz.path} {fuzz.body and fuzz.body[:1500]!r}: {fault}")
        elif reply.status == 200 and kind == "application/json" and fuzz.method != "HEAD":
            generator.learn(json.loads(answer))
    return counts, faults


def fuzz(minutes: float, seed: int, store: Path) -> dict[str, Any]:
    """Runs and reports. The bound of the store keeps its file small."""
    kept = ("--responses-store", "--responses-store-path", str(store), "--responses-store-max", "200")
    size = ("--max-model-len", "1024", "--kv-cache-memory", "48M", "--max-num-seqs", "16")
    with live("serve", *size, *kept, "--admin-api-key", "admin") as server:
        document = server.get("/openapi.json").json()
        known = known_answer(server)
        rounds = max(3, round(minutes))
        totals: collections.Counter[str] = collections.Counter()
        faults: list[str] = []
        observations: list[dict[str, int]] = []
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as threads:
            for number in range(rounds + 1):  # the first one warms caches and allocators up
                until = time.monotonic() + minutes * 60 / (rounds + 1)
                seeds = [seed + number * CLIENTS + index for index in range(CLIENTS)]
                jobs = [
                    threads.submit(client, server, Generator(document, "smollm2-135m", one), random.Random(one), until)
                    for one in seeds
                ]
                for job in jobs:
                    counts, found = job.result()
                    totals += counts
                    faults += found
                if not server.idle_within(20):
                    faults.append(f"round {number}: work or KV blocks are left 20 s after the last client")
                if known_answer(server) != known:
                    faults.append(f"round {number}: the known answer changed")
                time.sleep(0.3)
                observations.append(observe(server))
                shown = {kind: count for kind, count in sorted(totals.items()) if kind.isdigit() or kind == "left"}
                print(f"round {number}/{rounds}: {shown}, {observations[-1]}", flush=True)
        faults += growth(observations)
        faults += [f"the log says: {line}" for line in server.log if " ERROR " in line or "Traceback" in line]
        if (status := server.stop()) != 0:
            faults.append(f"the server ended with status {status}")
    return results.header("fuzz", {"minutes": minutes, "seed": seed}) | {
        "totals": dict(sorted(totals.items())), "observations": observations, "faults": faults,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-result", action="store_true", help="write no file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = fuzz(arguments.minutes, arguments.seed, Path(folder) / "responses.sqlite")
    if not arguments.no_result:
        write_result(result)
    for fault in result["faults"][:40]:
        print(f"FAULT {fault}", file=sys.stderr)
    return int(bool(result["faults"]))


if __name__ == "__main__":
    sys.exit(main())
