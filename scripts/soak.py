"""Long run against a real server: mixed requests, disconnects and bad input for minutes, watched for leaks and changed answers.

    python scripts/soak.py --minutes 20          # writes benchmarks/results/<date>-<machine>-<commit>-soak.json
    python scripts/soak.py --minutes 0.7 --no-result

Fails (exit status 1) when a known answer changes, a 5xx is caused by input, something stays running or waiting, KV blocks stay used,
or threads, file descriptors or memory grow.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import random
import socket
import sys
import time
from typing import Any

from harness import Live, growth, known_answer, live, observe, write_result

from octavo.bench import results

CLIENTS = 12
WORDS = "time year people way day man thing woman life child world school state family student group country problem".split()


def send(server: Live, path: str, body: bytes) -> socket.socket:
    connection = socket.create_connection((server.host, server.port), timeout=120)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def request(dice: random.Random) -> tuple[str, bytes]:
    """A random request, valid or not."""
    text = " ".join(dice.choices(WORDS, k=dice.choice((3, 30, 150, 500))))
    fields: dict[str, Any] = {"max_tokens": dice.choice((1, 8, 40, 120)), "stream": dice.random() < 0.5}
    fields |= dice.choice(
        (
            {"temperature": 0},
            {"temperature": 1, "seed": dice.randrange(1000), "top_p": 0.9},
            {"temperature": 0.7, "n": 2, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
            {"temperature": 0, "stop": ["the", "zz"]},
            {"temperature": 0, "ignore_eos": True, "min_tokens": 1},
        )
    )
    if dice.random() < 0.5:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields}
        if dice.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 3}
    else:
        path, body = "/v1/completions", {"prompt": text, **fields}
        if dice.random() < 0.2:
            body |= {"prompt_logprobs": 1, "echo": True}
    if dice.random() < 0.1:
        body |= dice.choice(
            ({"n": -1}, {"temperature": "hot"}, {"prompt": [10**9]}, {"nope": 1}, {"logit_bias": {"x": 1}})
        )
    data = json.dumps(body).encode()
    return path, data[: dice.randrange(len(data))] if dice.random() < 0.03 else data


def client(server: Live, seed: int, until: float) -> dict[str, int]:
    """Sends requests one after another, drops a third of them."""
    dice, counts = random.Random(seed), {"answered": 0, "refused": 0, "dropped": 0, "failed": 0}
    while time.monotonic() < until:
        path, body = request(dice)
        connection = send(server, path, body)
        try:
            if dice.random() < 1 / 3:
                time.sleep(dice.random() * 0.5)
                counts["dropped"] += 1
                continue
            reply = http.client.HTTPResponse(connection)
            reply.begin()
            reply.read()
            kind = "answered" if reply.status == 200 else "refused" if reply.status in (400, 429) else "failed"
            counts[kind] += 1
        finally:
            connection.close()
    return counts


def soak(minutes: float, seed: int, flags: list[str]) -> dict[str, Any]:
    # Memory for less than what the clients ask for at once, so that requests are preempted.
    with live("serve", "--max-model-len", "1024", "--kv-cache-memory", "32M", "--max-num-seqs", "16", *flags) as server:
        known = known_answer(server)
        rounds = max(3, round(minutes * 60 / 60)) + 1  # the first one warms caches and allocators up
        seconds = minutes * 60 / rounds
        totals: dict[str, int] = {}
        observations: list[dict[str, int]] = []
        faults: list[str] = []
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as threads:
            for number in range(rounds):
                until = time.monotonic() + seconds
                jobs = [threads.submit(client, server, seed + number * CLIENTS + i, until) for i in range(CLIENTS)]
                for job in jobs:
                    for kind, count in job.result().items():
                        totals[kind] = totals.get(kind, 0) + count
                if not server.idle_within(10):
                    faults.append(f"round {number}: work or KV blocks are left 10 s after the last client")
                if known_answer(server) != known:
                    faults.append(f"round {number}: the known answer changed")
                time.sleep(0.3)
                observations.append(observe(server))
                print(f"round {number + 1}/{rounds}: {totals}, {observations[-1]}", flush=True)
        if totals["failed"]:
            faults.append(f"{totals['failed']} answers were neither 200, 400 nor 429")
        faults += growth(observations)
        preemptions = server.metric("vllm:num_preemptions_total")
        if not preemptions:
            faults.append("nothing was preempted, so this run says nothing about preemption")
        status = server.stop()
        if status != 0:
            faults.append(f"the server ended with status {status}")
    options = {"minutes": minutes, "seed": seed, "flags": flags}
    return results.header("soak", options) | {
        "totals": totals, "preemptions": preemptions, "observations": observations, "faults": faults,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-result", action="store_true", help="write no result file")
    arguments, flags = parser.parse_known_args()
    result = soak(arguments.minutes, arguments.seed, flags)
    for fault in result["faults"]:
        print(f"FAULT: {fault}")
    if not arguments.no_result:
        write_result(result)
    print("no faults" if not result["faults"] else f"{len(result['faults'])} faults")
    return int(bool(result["faults"]))


if __name__ == "__main__":
    sys.exit(main())
