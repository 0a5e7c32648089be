"""What serving costs beside computing: HTTP against offline, threads against processes, and speed beside disturbances.

    python scripts/measure_server.py --rounds 3            # all parts; writes benchmarks/results/<...>-server.json
    python scripts/measure_server.py --parts burst,busy

Parts, each interleaved with what it is compared to, medians over rounds:
  start    seconds to /ready, resident memory with a KV budget of 128 MB
  process  one stream and 16 streams: engine in a thread with several GIL switch intervals, and in a child process;
           CPU time of the event loop per token
  http     16 streams through the server against the same work through the offline LLM
  burst    16 streams, alone and while 20 requests a second with 200 kB bodies come in: inter-token latencies
  python   one stream offline: the period of a token, and that of a model so small that next to nothing is computed,
           which bounds what Python and bookkeeping add to a step
  busy     one stream, alone and while a busy loop is pinned to one core
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from race import ready

from octavo import LLM, SamplingParams
from octavo.bench import results
from octavo.bench.local.throughput import percentile
from octavo.bench.report import server_table
from octavo.bench.workloads import WARM_UP, WARM_UP_SEED, WORDS, WORKLOADS

PORT = 8191
SWITCH_INTERVALS_S = (0.005, 0.001, 0.0001)
BURST_RATE_HZ, BURST_BYTES = 20, 200_000
BURST_STREAMS, BURST_TOKENS = 16, 160


class Server:
    """`octavo serve` as a process group. `switch_interval_s`: of the GIL."""

    def __init__(self, model: str, *flags: str, switch_interval_s: float | None = None) -> None:
        setting = "" if switch_interval_s is None else f"sys.setswitchinterval({switch_interval_s}); "
        code = f"import sys; {setting}from octavo.__main__ import entry; sys.argv[0] = 'octavo'; entry()"
        arguments = ["serve", model, "--served-model-name", "m", "--port", str(PORT), "--no-enable-prefix-caching"]
        started = time.monotonic()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `stop`
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments, *flags], stdout=self.log, stderr=self.log, start_new_session=True
        )
        while not ready(PORT):
            if self.process.poll() is not None:
                self.log.seek(0)
                raise SystemExit(f"octavo did not get ready:\n{self.log.read()[-2000:]}")
            time.sleep(0.01)
        self.ready_s = time.monotonic() - started

    def loop_cpu_s(self) -> float:
        """CPU time of the main thread, which is the event loop's."""
        fields = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/schedstat").read_text().split()
        return int(fields[0]) / 1e9

    def resident_bytes(self) -> int:
        """Of the process and its children."""
        family, total = {self.process.pid}, 0
        for status in sorted(Path("/proc").glob("[0-9]*/status"), key=lambda path: int(path.parent.name)):
            try:
                facts = dict(line.split(":", 1) for line in status.read_text().splitlines())
            except OSError:
                continue  # it has ended
            pid = int(facts["Pid"])
            if pid in family or int(facts["PPid"]) in family:
                family.add(pid)
                total += int(facts["VmRSS"].split()[0]) * 1024
        return total

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.log.close()


@contextmanager
def server(model: str, *flags: str, **options: Any) -> Iterator[Server]:
    started = Server(model, *flags, **options)
    try:
        asyncio.run(streams(WARM_UP.prompts(WARM_UP_SEED), 1, WARM_UP.output))
        yield started
    finally:
        started.stop()


async def streams(prompts: list[str], at_once: int, output: int) -> dict[str, float]:
    """Runs streams and returns tokens per second, and inter-token latencies in milliseconds."""
    gate = asyncio.Semaphore(at_once)
    gaps_ms: list[float] = []

    async def one(session: aiohttp.ClientSession, prompt: str) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        async with gate, session.post(f"http://127.0.0.1:{PORT}/v1/completions", json={**body, "stream": True}) as got:
            assert got.status == 200, await got.text()
            last = None
            async for line in got.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps_ms.append((now - last) * 1e3)
                    last = now

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(one(session, prompt) for prompt in prompts))
        wall_s = time.perf_counter() - started
    return {
        "out_tok_s": len(prompts) * output / wall_s,
        "itl_p50_ms": percentile(gaps_ms, 50),
        "itl_p99_ms": percentile(gaps_ms, 99),
        "itl_max_ms": max(gaps_ms),
    }


def run_workload(name: str, seed: int) -> dict[str, float]:
    workload = WORKLOADS[name]
    return asyncio.run(streams(workload.prompts(seed), workload.concurrency, workload.output))


def measure_start(model: str, seed: int) -> dict[str, dict[str, float]]:
    figures = {}
    for name, flags in (("thread", ()), ("child", ("--engine-process",))):
        with server(model, "--kv-cache-memory", "128M", *flags) as running:
            run_workload("single", seed)
            figures[name] = {"ready_s": running.ready_s, "resident_mb": running.resident_bytes() / 1e6}
    return figures


def measure_process(model: str, seed: int) -> dict[str, dict[str, float]]:
    variants: dict[str, tuple[tuple[str, ...], float | None]] = {
        f"thread, GIL switch interval {interval_s * 1e3:g} ms": ((), interval_s) for interval_s in SWITCH_INTERVALS_S
    }
    variants["child process"] = (("--engine-process",), None)
    figures = {}
    for name, (flags, interval_s) in variants.items():
        with server(model, *flags, switch_interval_s=interval_s) as running:
            figures[name] = {"single_tok_s": run_workload("single", seed)["out_tok_s"]}
            before = running.loop_cpu_s()
            many = run_workload("c16", seed)
            tokens = WORKLOADS["c16"].requests * WORKLOADS["c16"].output
            figures[name] |= {
                "c16_tok_s": many["out_tok_s"],
                "c16_itl_p99_ms": many["itl_p99_ms"],
                "loop_cpu_us_per_token": (running.loop_cpu_s() - before) / tokens * 1e6,
            }
    return figures


def measure_http(model: str, seed: int) -> dict[str, dict[str, float]]:
    with server(model, "--max-num-seqs", "16"):
        served = run_workload("c16", seed)["out_tok_s"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "offline.json"
        flags = ["--model", model, "--workload", "c16", "--rounds", "1", "--seed", str(seed), "--json", str(out)]
        subprocess.run([sys.executable, "-m", "octavo", "bench", "throughput", *flags], check=True, capture_output=True)
        offline = json.loads(out.read_text())["results"][0]["out_tok_s"]
    return {"c16": {"served_tok_s": served, "offline_tok_s": offline, "share": served / offline}}


async def bodies(stop: asyncio.Event, answers: dict[str, float]) -> None:
    """Sends large requests at a steady rate until told to stop; counts their answers by status."""
    text = " ".join(WORDS * (BURST_BYTES // sum(len(word) + 1 for word in WORDS) + 1))[:BURST_BYTES]
    pending: set[asyncio.Task[None]] = set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            body = json.dumps({"model": "m", "prompt": text, "max_tokens": 1}).encode()
            async with session.post(f"http://127.0.0.1:{PORT}/v1/completions", data=body) as got:
                await got.read()
                answers[str(got.status)] = answers.get(str(got.status), 0) + 1

        while not stop.is_set():
            pending.add(asyncio.create_task(one()))
            await asyncio.sleep(1 / BURST_RATE_HZ)
        await asyncio.gather(*pending)


async def streams_beside_bodies(prompts: list[str], output: int) -> dict[str, float]:
    stop, answers = asyncio.Event(), dict[str, float]()
    sending = asyncio.create_task(bodies(stop, answers))
    figures = await streams(prompts, len(prompts), output)
    stop.set()
    await sending
    return figures | {f"answers_{status}": count for status, count in answers.items()}


def measure_burst(model: str, seed: int) -> dict[str, dict[str, float]]:
    prompts = WORKLOADS["single"].prompts(seed) * (BURST_STREAMS // WORKLOADS["single"].requests)
    with server(model):
        alone = asyncio.run(streams(prompts, len(prompts), BURST_TOKENS))
        beside = asyncio.run(streams_beside_bodies(prompts, BURST_TOKENS))
    return {
        "alone": alone,
        "beside bodies": beside,
        "ratio": {key: beside[key] / alone[key] for key in ("itl_p50_ms", "itl_p99_ms", "out_tok_s")},
    }


def measure_python(model: str, _seed: int) -> dict[str, dict[str, float]]:
    tiny = str(Path(__file__).resolve().parent.parent / "tests/golden/tiny-llama")
    period_us = {name: token_period_s(path) * 1e6 for name, path in (("model", model), ("tiny", tiny))}
    return {"token period": {**period_us, "share": period_us["tiny"] / period_us["model"]}}


def token_period_s(model: str) -> float:
    with LLM(model, max_num_seqs=1) as llm:
        for count in (8, 96):
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            times = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)[0].metrics
    assert times is not None and times.first_token_s is not None
    return (times.finished_s - times.first_token_s) / (times.num_generated_tokens - 1)


def measure_busy(model: str, seed: int) -> dict[str, dict[str, float]]:
    with server(model):
        alone = run_workload("single", seed)["out_tok_s"]
        core = str(max(os.sched_getaffinity(0)))
        loop = subprocess.Popen(["taskset", "-c", core, sys.executable, "-c", "while True: pass"])
        try:
            beside = run_workload("single", seed + 1000)["out_tok_s"]
        finally:
            loop.kill()
            loop.wait()
    return {"single": {"alone_tok_s": alone, "busy_tok_s": beside, "share": beside / alone}}


PARTS = {
    "start": measure_start,
    "process": measure_process,
    "http": measure_http,
    "burst": measure_burst,
    "python": measure_python,
    "busy": measure_busy,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}")
    result = results.header("server", {"model": arguments.model, "rounds": arguments.rounds, "seed": arguments.seed})
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {part: [] for part in parts}
    for number in range(arguments.rounds):
        for part in parts:
            figures = PARTS[part](arguments.model, arguments.seed + number)
            rounds[part].append(figures)
            print(f"round {number + 1} {part}: {figures}", file=sys.stderr, flush=True)
    medians = {
        part: {
            name: {key: statistics.median(one[name].get(key, 0.0) for one in measured) for key in measured[0][name]}
            for name in measured[0]
        }
        for part, measured in rounds.items()
    }
    result |= {"model": arguments.model, "results": medians, "rounds": rounds, "load_after": results.load_average()}
    print("\n".join(server_table(result)))
    print(f"\nwritten to {results.write(result, arguments.json)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
