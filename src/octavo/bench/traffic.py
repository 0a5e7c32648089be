"""Traffic: what is asked of an engine, and when. The one description that the simulator and the load bench both run.

A job's prompt is made of named parts, each with a number of words. Equal names (and equal seeds) give equal words, and a part of 100 words
is the beginning of the same part with 200, so that shared and growing prefixes are said by name. Words are common nouns, of which every
large vocabulary has nearly each as one token. Knows no engine, no server and no results.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.workloads import WORDS, WORKLOADS
from octavo.errors import ConfigError

Part = tuple[str, int]
"""(name, words)."""

_INDICES = bytes(byte % len(WORDS) for byte in range(256))
"""A random byte -> index of a word."""
_WORD_OF_INDEX = dict(enumerate(WORDS))


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. Also a line of a trace file.

    It is sent at `at_s` (seconds from the start) at the earliest, and not before the preceding job of its `session` has ended and
    `think_s` more have passed. `prompt` is a sequence of parts; `text`, instead of it, is literal. `output_tokens` are generated,
    whatever the model says. `tenant` chooses the API key. `kind` is the line of the report that it counts in.
    """

    output_tokens: int
    prompt: tuple[Part, ...] = ()
    text: str | None = None
    at_s: float = 0.0
    session: str = ""
    think_s: float = 0.0
    tenant: str = ""
    priority: int = 0
    kind: str = ""

    @property
    def num_words(self) -> int:
        """Length of the prompt in words, which is nearly its length in tokens."""
        return sum(count for _, count in self.prompt) if self.text is None else len(self.text.split())


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs in order of being sent, of which `max_concurrency` at most run at once; further ones wait at the client, unseen by the server.

    Jobs whose turn comes later than `until_s` are not sent at all, so that sessions can go on for a time instead of a number.
    """

    name: str
    jobs: tuple[Job, ...]
    max_concurrency: int | None = None
    until_s: float = float("inf")
    seed: int = 0

    def word_indices(self, job: Job) -> tuple[int, ...]:
        """The prompt as indices into `WORDS`. Raises ConfigError when it is literal text."""
        if job.text is not None:
            raise ConfigError(
                "the prompts are literal text; only made-up ones, whose length is known, can be simulated"
            )
        return tuple(b"".join(_part(self.seed, name, count) for name, count in job.prompt))

    def text(self, job: Job) -> str:
        """The prompt as text."""
        if job.text is not None:
            return job.text
        return " ".join(map(_WORD_OF_INDEX.__getitem__, self.word_indices(job)))

    def check(self) -> Traffic:
        """Itself. Raises ConfigError for what cannot be sent."""
        if not self.jobs:
            raise ConfigError(f"{self.name} has no requests")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError("--max-concurrency must be at least 1", param="max_concurrency")
        for number, job in enumerate(self.jobs, 1):
            words = [count for _, count in job.prompt]
            if (job.text is None) != bool(words) or any(count < 0 for count in words) or not job.num_words:
                raise ConfigError(
                    f"request {number} of {self.name} needs either prompt parts or text, of at least 1 word"
                )
            if job.output_tokens < 1 or not 0 <= job.at_s < float("inf") or not 0 <= job.think_s < float("inf"):
                raise ConfigError(
                    f"request {number} of {self.name}: output_tokens must be at least 1, at_s and think_s at least 0"
                )
        return self


def _part(seed: int, name: str, count: int) -> bytes:
    # Whole 32-bit words are drawn in order, so that a shorter part is the beginning of a longer one.
    return random.Random(f"{seed}/{name}").randbytes(-(-count // 4) * 4)[:count].translate(_INDICES)


# --- kinds of traffic -----------------------------------------------------------------------------------------------


def race(name: str, seed: int) -> Traffic:
    """One of the workloads that engines are compared on. Raises ConfigError for another name."""
    if name not in WORKLOADS:
        raise ConfigError(f"no workload {name!r}: there are {', '.join(WORKLOADS)}", param="dataset_name")
    workload = WORKLOADS[name]
    shared: tuple[Part, ...] = (("shared", workload.shared_words),) if workload.shared_words else ()
    return Traffic(
        name=name,
        jobs=tuple(
            Job(prompt=(*shared, (f"own {number}", workload.words)), output_tokens=workload.output)
            for number in range(workload.requests)
        ),
        max_concurrency=workload.concurrency,
        seed=seed,
    )


def random_lengths(
    num_prompts: int, *, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0, seed: int = 0
) -> Traffic:
    """Prompts with nothing in common but `prefix_len` words; lengths uniform within (1 - ratio) to (1 + ratio) times what is given.

    Raises ConfigError for a ratio outside 0..1.
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError("--random-range-ratio must be 0 or more and below 1", param="random_range_ratio")
    draw = random.Random(f"{seed}/lengths")

    def length(mean: int) -> int:
        return max(1, draw.randint(int(mean * (1 - range_ratio)), -int(-mean * (1 + range_ratio) // 1)))

    prefix: tuple[Part, ...] = (("prefix", prefix_len),) if prefix_len else ()
    jobs = tuple(
        Job(prompt=(*prefix, (f"own {number}", length(input_len))), output_tokens=length(output_len))
        for number in range(num_prompts)
    )
    return Traffic(name="random", jobs=jobs, seed=seed).check()


def repeated_prefixes(
    num_prompts: int, *, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int, seed: int = 0
) -> Traffic:
    """`num_prefixes` different beginnings, each shared by as many prompts as the others, in random order."""
    if num_prefixes < 1:
        raise ConfigError("--prefix-repetition-num-prefixes must be at least 1", param="prefix_repetition_num_prefixes")
    jobs = [
        Job(
            prompt=((f"prefix {number % num_prefixes}", prefix_len), (f"own {number}", suffix_len)),
            output_tokens=output_len,
        )
        for number in range(num_prompts)
    ]
    random.Random(f"{seed}/order").shuffle(jobs)
    return Traffic(name="prefix_repetition", jobs=tuple(jobs), seed=seed).check()


def chats(num_prompts: int, *, seed: int = 0) -> Traffic:
    """Made-up conversations of people with an assistant, each of 1 to 6 turns that resend all of what was said before.

    Lengths are log-normal, like those that published chat logs show: a question has a median of 40 words, an answer of 150 tokens. What the
    assistant "said" in earlier turns is made up as well, so that the prompts do not depend on the model.
    """
    draw = random.Random(f"{seed}/chats")
    jobs: list[Job] = []
    number = 0
    while len(jobs) < num_prompts:
        history: tuple[Part, ...] = ()
        for turn in range(draw.randint(1, 6)):
            question = min(1000, max(2, int(draw.lognormvariate(3.7, 1.0))))
            answer = min(1000, max(2, int(draw.lognormvariate(5.0, 0.8))))
            history = (*history, (f"user {number}.{turn}", question))
            jobs.append(
                Job(prompt=history, output_tokens=answer, session=f"chat {number}", think_s=1.0 if turn else 0.0)
            )
            history = (*history, (f"assistant {number}.{turn}", answer))
        number += 1
    return Traffic(name="chats", jobs=tuple(jobs[:num_prompts]), seed=seed).check()


def arriving(traffic: Traffic, request_rate: float, burstiness: float = 1.0) -> Traffic:
    """The same jobs, sent at random times with a mean of `request_rate` per second (infinite: at once).

    Gaps have a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier, more is more even. Jobs of a session
    but its first keep waiting for the one before. Raises ConfigError unless both are above 0.
    """
    if not request_rate > 0 or not 0 < burstiness < float("inf"):
        raise ConfigError("--request-rate and --burstiness must be above 0", param="request_rate")
    if request_rate == float("inf"):
        return traffic
    draw, now_s, started, jobs = random.Random(f"{traffic.seed}/arrivals"), 0.0, set[str](), []
    for job in traffic.jobs:
        if job.session and job.session in started:
            jobs.append(job)
            continue
        started.add(job.session)
        jobs.append(msgspec.structs.replace(job, at_s=now_s))
        now_s += draw.gammavariate(burstiness, 1 / (request_rate * burstiness))
    return msgspec.structs.replace(traffic, jobs=tuple(jobs))


# --- files ----------------------------------------------------------------------------------------------------------


def read_trace(path: Path, seed: int = 0) -> Traffic:
    """Traffic of a JSONL file, one `Job` per line. Raises ConfigError that names file and line."""
    jobs = tuple(_lines(path, Job))
    return Traffic(name=path.stem, jobs=tuple(sorted(jobs, key=lambda job: job.at_s)), seed=seed).check()


def write_trace(traffic: Traffic, path: Path) -> None:
    """Writes what `read_trace` reads. Raises ConfigError when it cannot."""
    try:
        path.write_bytes(b"".join(msgspec.json.encode(job) + b"\n" for job in traffic.jobs))
    except OSError as error:
        raise ConfigError(f"the trace cannot be written: {error}") from None


class _Custom(msgspec.Struct, frozen=True):
    prompt: str
    output_tokens: int | None = None


def read_custom(path: Path, num_prompts: int, output_len: int) -> Traffic:
    """Traffic of a JSONL file with a literal `prompt` and perhaps `output_tokens` per line, as vLLM's `custom` dataset has it."""
    jobs = [
        Job(text=line.prompt, output_tokens=line.output_tokens or output_len)
        for line, _ in zip(_lines(path, _Custom), range(num_prompts), strict=False)
    ]
    return Traffic(name="custom", jobs=tuple(jobs)).check()


def read_sharegpt(path: Path, num_prompts: int, output_len: int | None, seed: int = 0) -> Traffic:
    """The first question of conversations drawn from a file in ShareGPT's format, with an output as long as the answer there.

    Lengths of answers are words times 1.3, which is near what tokenizers make of English. Raises ConfigError for another format.
    """
    try:
        talks = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no file in ShareGPT's format: {error}", param="dataset_path") from None
    pairs = []
    for talk in talks:
        turns = talk.get("conversations")
        if isinstance(turns, list) and len(turns) >= 2:
            question, answer = (str(turn.get("value", "")) if isinstance(turn, dict) else "" for turn in turns[:2])
            if question.strip() and answer.strip():
                pairs.append((question, answer))
    random.Random(seed).shuffle(pairs)
    jobs = [
        Job(text=question, output_tokens=output_len or max(1, round(1.3 * len(answer.split()))))
        for question, answer in pairs[:num_prompts]
    ]
    return Traffic(name="sharegpt", jobs=tuple(jobs), seed=seed).check()


def _lines(path: Path, kind: type[Any]) -> Iterator[Any]:
    try:
        lines: Sequence[bytes] = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="dataset_path") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield msgspec.json.decode(line, type=kind)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}, line {number}: {error}", param="dataset_path") from None


def sessions(jobs: Iterable[Job]) -> list[list[int]]:
    """Indices of the jobs that follow one another, in order; a job without a session is alone."""
    chains: dict[str, list[int]] = {}
    result = []
    for index, job in enumerate(jobs):
        if job.session and job.session in chains:
            chains[job.session].append(index)
        else:
            chain = [index]
            result.append(chain)
            if job.session:
                chains[job.session] = chain
    return result
