"""Long run of the whole engine on a real model: does anything that runs beside a request change its answer?

    python scripts/invariance.py --minutes 5     # writes benchmarks/results/<date>-<machine>-<commit>-invariance.json
    python scripts/invariance.py --minutes 2 --seed 7 --no-result
    python scripts/invariance.py --seed 7 --round 4      # that round again

Each round is an engine of its own, composed as a server composes it, with settings drawn at random: policy, slots, chunks, block size, KV
format, memory from just the longest request's need on, prefix cache, pins, swap space, files of evicted blocks (the same folder for all
rounds, some of its files damaged in between), threads. Requests of many lengths, kinds of sampling, tenants and priorities, many of which
begin alike, come at random; some are cancelled, also while a step computes them. The scheduler's invariants are checked after every step.

Every answer is compared to that of the same request alone, without a prefix cache: tokens, all bits of log-probabilities of
output and prompt, and how it ended; of a cancelled one, what it got until then. Fails (exit status 1) at the first difference, and
when something was never exercised, as the run then says nothing about it.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench import results
from octavo.config import BackendConfig, CacheConfig, Config, ModelConfig, SchedulerConfig
from octavo.contracts import (
    EngineOutput,
    FinishReason,
    GenerateRequest,
    RequestId,
    StepPlan,
    TokenEvent,
    TokenLogprobs,
    TokenSampling,
)
from octavo.frontend.build import Back, load_back, load_tokenizer
from octavo.loaders.checkpoint import Checkpoint, open_checkpoint
from octavo.runner.kv_budget import request_bytes
from octavo.runner.load import read_spec

ROOT = Path(__file__).resolve().parent.parent
MAX_MODEL_LEN = 512
NUM_STEMS = 6
NUM_REQUESTS = 60
"""Different requests of a run; what they get alone is computed when it is first needed."""
KV_BYTES = {"auto": (2.0, 0), "int8": (1.0, 4)}
"""Bytes of a value of K or V, and of the scale of each head's."""
MUST_HAPPEN = (
    "preempted", "displaced", "cancelled", "cancelled_in_flight", "waits", "copied_blocks", "evicted_blocks", "device_hit_tokens",
    "disk_hit_tokens", "swapped_in_blocks", "missing_files", "pinned",
)  # fmt: skip


class Answer(msgspec.Struct):
    """What a request got."""

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None

    def take(self, event: TokenEvent) -> None:
        """Adds an event."""
        if event.finish_reason is FinishReason.ERROR:
            raise RuntimeError(f"{event.request_id} ended with {event.error_code}: {event.error_message}")
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_token = event.finish_reason, event.stop_token


def same(answer: Answer, alone: Answer) -> bool:
    """Whether an answer is, to the bit, what the request got alone, or the beginning of that if it was cancelled."""
    if answer.finish_reason is FinishReason.ABORT:
        count = len(answer.token_ids)
        prompt_logprobs = alone.prompt_logprobs if answer.prompt_logprobs is not None else None
        alone = Answer(
            alone.token_ids[:count], alone.logprobs[:count], prompt_logprobs, FinishReason.ABORT, answer.stop_token
        )
    return msgspec.msgpack.encode(answer) == msgspec.msgpack.encode(alone)


def catalogue(seed: int, tokens: list[int], eos_token_ids: tuple[int, ...]) -> list[GenerateRequest]:
    """The different requests of a run, cut from a text."""
    dice = random.Random(f"{seed}/requests")

    def cut(length: int) -> list[int]:
        begin = dice.randrange(len(tokens) - length)
        return tokens[begin : begin + length]

    stems = [cut(dice.choice((30, 64, 130, 300))) for _ in range(NUM_STEMS)]
    made = []
    for index in range(NUM_REQUESTS):
        stem = dice.choice(stems)
        kept = dice.choice((0, len(stem), len(stem), dice.randrange(len(stem)), len(stem) // 32 * 32))
        prompt = (stem[:kept] + cut(dice.choice((0, 1, 3, 16, 40, dice.randint(1, 100))))) or cut(1)
        sampling = TokenSampling(
            max_tokens=dice.choice((1, 4, 40, 80, 110)),
            min_tokens=dice.choice((0, 0, 1)),
            temperature=dice.choice((0.0, 0.7, 1.0)),
            top_p=dice.choice((1.0, 0.9)),
            top_k=dice.choice((0, 0, 40)),
            frequency_penalty=dice.choice((0.0, 0.5)),
            repetition_penalty=dice.choice((1.0, 1.1)),
            seed=index,
            choice=dice.choice((0, 0, 1)),
            logprobs=dice.choice((0, 3)),
            prompt_logprobs=dice.choice((None, None, None, 1)),
            eos_token_ids=eos_token_ids,
            stop_token_ids=(dice.choice(tokens),) if dice.random() < 0.3 else (),
            ignore_eos=dice.random() < 0.5,
        )
        made.append(GenerateRequest(request_id=RequestId(""), prompt_token_ids=tuple(prompt), sampling=sampling))
    return made


def draw(dice: random.Random, checkpoint: Checkpoint) -> Config:
    """Settings of a round."""
    kv: Any = dice.choice(("auto", "auto", "int8"))
    block_size: Any = dice.choice((8, 16, 16, 16, 32))
    policy: Any = dice.choice(("fcfs", "priority", "fair"))
    slots, chunked, caching = dice.choice((1, 6, 16, 16, 24)), dice.random() < 0.8, dice.random() < 0.85
    budget = dice.choice((24, 48, 96, 250, 512)) if chunked else MAX_MODEL_LEN
    pinned = dice.choice((0, 0, 64, 256)) if caching else 0
    groups = read_spec(checkpoint).kv_groups(*KV_BYTES[kv])
    need = request_bytes(groups, MAX_MODEL_LEN, block_size=block_size, max_chunk=budget)
    per_token = sum(group.bytes_per_token for group in groups)
    memory = need + per_token * (pinned + block_size * dice.choice((0, 0, 1, 3, 8, 100)))
    return Config(
        model=ModelConfig(model=checkpoint.name, max_model_len=MAX_MODEL_LEN),
        backend=BackendConfig(threads=dice.choice((1, 2))),
        cache=CacheConfig(
            block_size=block_size,
            kv_cache_dtype=kv,
            kv_cache_memory=str(memory),
            enable_prefix_caching=caching,
            max_pinned_tokens=pinned,
            swap_space=round(dice.choice((0, 10, 1000)) * per_token * block_size / 2**30, 4),
            kv_offloading_size=dice.choice((0.0, 0.02, 0.5, 0.5)) if caching else 0.0,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=dice.choice((None, 0, 8, 60)) if chunked else None,
            max_long_partial_prefills=dice.choice((None, 2, 5)) if chunked else None,
            num_scheduler_steps=dice.choice((None, 2, 8)),
            scheduling_policy=policy,
            priority_ageing=dice.choice((None, 0.5)) if policy == "priority" else None,
            tenant_weights=dice.choice(((), ("a=3",))) if policy == "fair" else (),
        ),
    )


@contextmanager
def engine(checkpoint: Checkpoint, config: Config, folder: Path | None = None) -> Iterator[Back]:
    """An engine as a server has it, without its thread. `folder`: where its files are, if it has any."""
    if config.cache.kv_offloading_size and folder is not None:
        cache = msgspec.structs.replace(config.cache, kv_offloading_folder=str(folder))
        config = msgspec.structs.replace(config, cache=cache)
    back = load_back(checkpoint, config)
    try:
        yield back
    finally:
        back.close()
        if back.grammar is not None:
            back.grammar.stop()


class Alone:
    """What requests get alone, by KV format: computed once each, in one engine per format that caches nothing."""

    def __init__(self, checkpoint: Checkpoint, requests: list[GenerateRequest]) -> None:
        self._checkpoint = checkpoint
        self._requests = requests
        self._answers: dict[tuple[str, int], Answer] = {}

    def get(self, kv: str, numbers: set[int]) -> dict[int, Answer]:
        """The answers to requests by their number."""
        missing = sorted(number for number in numbers if (kv, number) not in self._answers)
        if missing:
            dtype: Any = kv
            cache = CacheConfig(kv_cache_dtype=dtype, kv_cache_memory="64M", enable_prefix_caching=False)
            model = ModelConfig(model=self._checkpoint.name, max_model_len=MAX_MODEL_LEN)
            with engine(self._checkpoint, Config(model=model, cache=cache)) as back:
                for number in missing:
                    answer = self._answers[kv, number] = Answer()
                    back.scheduler.add(
                        msgspec.structs.replace(self._requests[number], request_id=RequestId(f"alone-{number}"))
                    )
                    while (plan := back.scheduler.plan()) is not None:
                        for event in step(back, plan).events:
                            answer.take(event)
        return {number: self._answers[kv, number] for number in numbers}


def step(back: Back, plan: StepPlan, between: Any = None) -> EngineOutput:
    """One step; `between` is called while it is in flight."""
    begin_s = time.perf_counter()
    handle = back.executor.submit(plan)
    if between is not None:
        between()
    result = handle.sample(None)
    back.scheduler.verify(plan, result)
    return back.scheduler.commit(plan, result, time.perf_counter() - begin_s)


def play(back: Back, requests: list[GenerateRequest], dice: random.Random, counts: Counter[str]) -> dict[str, Answer]:
    """One round: the requests come in at random, some are cancelled, and the invariants are checked after every step."""
    scheduler = back.scheduler
    answers: dict[str, Answer] = {}
    pending = list(reversed(requests))
    eagerness = dice.choice((0.1, 0.5, 1.0))

    def take(output: EngineOutput | None) -> None:
        if output is None:
            return
        for event in output.events:
            answers[event.request_id].take(event)
            counts["pinned"] += bool(event.num_pinned_tokens)
        stats = output.stats
        counts["preempted"] += stats.num_preemptions
        counts["displaced"] += stats.num_displaced
        if stats.cache is not None:
            for name, value in msgspec.structs.asdict(stats.cache).items():
                if isinstance(value, int) and not name.endswith("_bytes") and name != "pinned_tokens":
                    counts[name] += value

    def cancel(kind: str) -> None:
        live = [name for name, answer in answers.items() if answer.finish_reason is None]
        if live:
            scheduler.cancel([RequestId(dice.choice(live))])
            counts[kind] += 1

    while pending or scheduler.has_work:
        if pending and (not scheduler.has_work or dice.random() < eagerness):
            for _ in range(min(dice.choice((1, 1, 2, 6)), len(pending))):
                spec = msgspec.structs.replace(pending.pop(), arrival_s=time.monotonic())
                answers[spec.request_id] = Answer()
                scheduler.add(spec)
        if dice.random() < 0.01:
            cancel("cancelled")
        if dice.random() < 0.002:
            scheduler.reset_prefix_cache()
            counts["resets"] += 1
        if dice.random() < 0.01:
            scheduler.unpin(None, b"")
        plan = scheduler.plan()
        if plan is not None:
            counts["steps"] += 1
            counts["computed_tokens"] += plan.num_tokens
            in_flight = dice.random() < 0.01
            take(step(back, plan, (lambda: cancel("cancelled_in_flight")) if in_flight else None))
            scheduler.check()
        take(scheduler.flush())
    scheduler.check_idle()
    farewell = scheduler.farewell()
    if farewell is not None:
        step(back, farewell)
    return answers


def damage(folder: Path, dice: random.Random) -> None:
    """Flips a bit in some of the files."""
    share = dice.choice((0.0, 0.3))
    for path in sorted(folder.glob("*.kv")):
        if dice.random() < share:
            data = bytearray(path.read_bytes())
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            path.write_bytes(data)


def run(model: str, minutes: float, seed: int, only: int | None) -> dict[str, Any]:
    """The whole run, as a result."""
    checkpoint = open_checkpoint(model)
    tokenizer = load_tokenizer(checkpoint)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "guides").glob("*.md")))
    requests = catalogue(seed, tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids)
    alone = Alone(checkpoint, requests)
    counts: Counter[str] = Counter()
    faults: list[str] = []
    rounds: list[dict[str, Any]] = []
    until_s = time.monotonic() + minutes * 60
    number = 0 if only is None else only
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        while not faults and (time.monotonic() < until_s if only is None else number == only):
            dice = random.Random(f"{seed}/{number}")
            config = draw(dice, checkpoint)
            numbers = [dice.randrange(len(requests)) for _ in range(dice.randint(15, 40))]
            specs = [
                msgspec.structs.replace(
                    requests[which],
                    request_id=RequestId(f"{index}-{which}"),
                    tenant=dice.choice(("default", "a", "b")),
                    priority=dice.choice((0, 0, -1, 5)),
                    namespace=dice.choice((b"", b"", b"", b"salt")),
                    pin=config.cache.max_pinned_tokens > 0 and dice.random() < 0.2,
                )
                for index, which in enumerate(numbers)
            ]
            damage(folder, dice)
            with engine(checkpoint, config, folder) as back:
                answers = play(back, specs, dice, counts)
            expected = alone.get(config.cache.kv_cache_dtype, set(numbers))
            for index, which in enumerate(numbers):
                answer = answers[f"{index}-{which}"]
                counts["answers"] += 1
                counts["tokens"] += len(answer.token_ids)
                counts["logprobs"] += sum(len(entry.logprobs) for entry in answer.logprobs)
                counts["prompt_logprobs"] += len(answer.prompt_logprobs or ())
                if not same(answer, expected[which]):
                    faults.append(f"round {number}: {index}-{which} got {answer}, alone {expected[which]}")
            rounds.append({"round": number, "requests": len(numbers)} | _settings(config))
            print(f"round {number}: {len(numbers)} answers, {len(faults)} differ; {_short(config)}", flush=True)
            number += 1
    if only is None and not faults:
        faults += [
            f"{name}: it never happened, so this run says nothing about it" for name in MUST_HAPPEN if not counts[name]
        ]
    options = {"model": model, "minutes": minutes, "seed": seed}
    return results.header("invariance", options) | {"counts": dict(counts), "rounds": rounds, "faults": faults}


def _settings(config: Config) -> dict[str, Any]:
    """What of a round's settings is not the default."""
    settings: dict[str, Any] = {"threads": config.backend.threads}
    for section, default in ((config.cache, CacheConfig()), (config.scheduler, SchedulerConfig())):
        values = msgspec.structs.asdict(section)
        settings |= {name: value for name, value in values.items() if value != getattr(default, name)}
    return settings


def _short(config: Config) -> str:
    return ", ".join(f"{name} {value}" for name, value in _settings(config).items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=5.0, help="no new round begins after so long (default: 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int, help="only this one, with an empty folder of files")
    parser.add_argument("--no-result", action="store_true", help="write no result file")
    arguments = parser.parse_args()
    logging.getLogger("octavo").setLevel(logging.ERROR)  # damaged files are warned of, which is what we want them to be
    result = run(arguments.model, arguments.minutes, arguments.seed, arguments.round)
    for fault in result["faults"]:
        print(f"FAULT: {fault}")
    print(", ".join(f"{name} {count}" for name, count in sorted(result["counts"].items())))
    if arguments.round is None and not arguments.no_result:
        print(f"written to {results.write(result, folder=ROOT / results.RESULTS_FOLDER)}")
    print("no difference" if not result["faults"] else f"{len(result['faults'])} faults")
    return int(bool(result["faults"]))


if __name__ == "__main__":
    sys.exit(main())
