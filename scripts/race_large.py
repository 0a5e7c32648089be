"""Races Octavo against other engines, without servers, on a model too large for any cache: one stream, 16 rows, and a prompt of 256 tokens.

    octavo bench synthesize large.gguf --like smollm2-135m --layers 28 --hidden 1536 --heads 12 --kv-heads 2 --head-dim 128 \\
        --ffn 8960 --vocab 49152 --context 8192 --format q4_0
    python scripts/race_large.py --peers DIR --model large.gguf --rounds 3

Speeds of `single` and `rows16` are of generation alone (tokens per second of all rows, prompts not counted), for every engine; `prompt` is
the time that 256 tokens take, in proportion where an engine's tokenizer made more of the text. OpenVINO GenAI runs in the peers' own
environment; its time per token is its time to generate less that to the first token, since what it calls TPOT shrinks with the batch.
Writes benchmarks/results/<date>-<machine>-<commit>-race.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from race import Place, add_flags, run, run_rounds

from octavo.bench.local.throughput import Options, run_workload
from octavo.bench.workloads import Workload

PROMPT_TOKENS = 256
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="single", description="one stream", requests=2, concurrency=1, words=16, output=48),
        Workload(name="rows16", description="16 streams", requests=16, concurrency=16, words=16, output=48),
        Workload(name="prompt", description="prompts", requests=3, concurrency=1, words=PROMPT_TOKENS - 8, output=2),
    )
}

OPENVINO = """
import json, statistics, sys
import openvino_genai as ov
model, at_once, output, prompts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
scheduler = ov.SchedulerConfig()
scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 4, at_once, 2048
scheduler.enable_prefix_caching = False
pipe = ov.LLMPipeline(model, "CPU", scheduler_config=scheduler)
config = ov.GenerationConfig()
config.max_new_tokens, config.ignore_eos, config.do_sample, config.apply_chat_template = output, True, False, False
pipe.generate(["warm up"], config)
batches = [prompts] if at_once > 1 else [[prompt] for prompt in prompts]
metrics = [pipe.generate(batch, config).perf_metrics for batch in batches]
print(json.dumps({
    "tpot_ms": statistics.median(
        (one.get_generate_duration().mean - one.get_ttft().mean) / (output - 1) for one in metrics
    ),
    "ttft_ms": statistics.median(one.get_ttft().mean for one in metrics),
    "prompt_tokens": statistics.median(one.get_num_input_tokens() for one in metrics) / len(batches[0]),
}))
"""


def figures(work: str, *, tpot_ms: float, ttft_ms: float, prompt_tokens: float) -> dict[str, float]:
    if work == "prompt":
        return {"out_tok_s": 0.0, "ttft_p50": ttft_ms * PROMPT_TOKENS / prompt_tokens}
    return {"out_tok_s": 1e3 * WORKLOADS[work].concurrency / tpot_ms}


def race_octavo(work: str, seed: int, model: Path, _place: Place) -> dict[str, float]:
    measured = run_workload(WORKLOADS[work], Options(model=str(model), engine={"kv_cache_memory": "512M"}), seed=seed)
    tpot_ms, ttft_ms = measured["tpot_p50_ms"], measured["ttft_p50_ms"]
    return figures(work, tpot_ms=tpot_ms, ttft_ms=ttft_ms, prompt_tokens=measured["prompt_tokens"])


def race_openvino(work: str, seed: int, model: Path, place: Place) -> dict[str, float]:
    workload = WORKLOADS[work]
    program = [str(place.peers / "ov/bin/python"), "-c", OPENVINO, str(model)]
    text = run([*program, str(workload.concurrency), str(workload.output), json.dumps(workload.prompts(seed))])
    return figures(work, **json.loads(text.splitlines()[-1]))


def race_llama(work: str, _seed: int, model: Path, place: Place) -> dict[str, float]:
    workload = WORKLOADS[work]
    if work == "rows16":
        program = place.llama("llama-batched-bench")
        sizes = ["-npp", "16", "-ntg", str(workload.output), "-npl", str(workload.concurrency), "-c", "2048"]
        flags = ["--output-format", "jsonl"]
    else:
        program = place.llama("llama-bench")
        sizes = ["-p", "0", "-n", str(workload.output)] if work == "single" else ["-p", str(PROMPT_TOKENS), "-n", "0"]
        flags = ["-r", "2", "-o", "json"]
    text = run([program, "-m", str(model), "-t", "2", *sizes, *flags], LD_LIBRARY_PATH=str(Path(program).parent))
    if work == "rows16":
        line = next(line for line in text.splitlines() if line.startswith("{"))
        return {"out_tok_s": json.loads(line)["speed_tg"]}
    speed = json.loads(text)[0]["avg_ts"]
    return {"out_tok_s": speed} if work == "single" else {"out_tok_s": 0.0, "ttft_p50": PROMPT_TOKENS / speed * 1e3}


CONTESTANTS: dict[str, Any] = {
    "offline-octavo": race_octavo,
    "offline-openvino": race_openvino,
    "offline-llama": race_llama,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, list(WORKLOADS), list(CONTESTANTS), default=",".join(CONTESTANTS))
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="GGUF in Q4_0")
    arguments = parser.parse_args()
    place = Place(arguments.peers.resolve(), Path(), 0, ())
    model = arguments.model.resolve()

    def one(name: str, work: str, seed: int) -> Any:
        return CONTESTANTS[name](work, seed, model, place)

    return run_rounds(arguments, f"{model.stem}, generation alone", one)


if __name__ == "__main__":
    sys.exit(main())
