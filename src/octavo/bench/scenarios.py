"""Scenarios: situations in which people judge a server, each as traffic for one or more configurations and claims about the figures.

Data only. `octavo.bench.scenario_runs` has them run by real servers or by the simulator. Lengths are in words, about one token each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.bench.traffic import Job, Part, Traffic, race
from octavo.bench.workloads import WORKLOADS
from octavo.config import CacheConfig, Config, SchedulerConfig, ServerConfig

Figures = Mapping[str, Any]

SMALL = "smollm2-135m"
LONG = "long-context"
"""A made-up model whose context of 32,768 holds what SmolLM2's 8,192 does not; made when it is first needed."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic on a server of its own, configured as said here and by default otherwise."""

    label: str
    traffic: Traffic
    config: Config = Config()


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What shall hold: `value` of the runs' figures (by label) is at most or at least `limit`. Without a limit it is only shown."""

    text: str
    value: Callable[[Mapping[str, Figures]], float]
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""

    def holds(self, value: float) -> bool | None:
        """Whether the value is within the limit; None without one."""
        if self.at_most is not None:
            return value <= self.at_most
        return None if self.at_least is None else value >= self.at_least


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """`runs` gives the runs of a seed, in the order in which they are measured."""

    name: str
    description: str
    runs: Callable[[int], tuple[Run, ...]]
    claims: tuple[Claim, ...]
    model: str = SMALL


def _kind(figures: Figures, kind: str) -> Figures:
    """The figures of a kind of jobs; those of all where there is only one kind."""
    found: Figures = figures["kinds"].get(kind, figures)
    return found


# --- prefix cache ---------------------------------------------------------------------------------------------------

_NO_CACHE = Config(cache=CacheConfig(enable_prefix_caching=False))


def _growing_file(seed: int) -> Traffic:
    """The same file of 8,000 words, resent with turns that grow: as editors and agents do."""
    jobs: list[Job] = []
    history: tuple[Part, ...] = (("file", 8000),)
    for turn in range(16):
        history = (*history, (f"question {turn}", 40))
        jobs.append(Job(prompt=history, output_tokens=16, session="editor", kind="growing file"))
        history = (*history, (f"answer {turn}", 60))
    return Traffic(name="growing file", jobs=tuple(jobs), seed=seed)


def _common_system(seed: int) -> Traffic:
    """A system prompt of 1,000 words that all users share, and 800 of their own."""
    jobs = [
        Job(prompt=(("system", 1000), (f"user {user}", 800)), output_tokens=16, kind="common system prompt")
        for user in range(24)
    ]
    return Traffic(name="common system prompt", jobs=tuple(jobs), max_concurrency=4, seed=seed)


def _retrieval(seed: int) -> Traffic:
    """Instructions of 160 words, then chunks that nobody sent before."""
    jobs = [
        Job(prompt=(("instructions", 160), (f"chunks {query}", 1500)), output_tokens=16, kind="retrieval")
        for query in range(24)
    ]
    return Traffic(name="retrieval", jobs=tuple(jobs), max_concurrency=4, seed=seed)


def _code_base(seed: int) -> Traffic:
    """The same code base of 10,000 words, with another diff at its end each time."""
    jobs = [
        Job(prompt=(("code", 10_000), (f"diff {number}", 150)), output_tokens=16, kind="code base")
        for number in range(40)
    ]
    return Traffic(name="code base", jobs=tuple(jobs), max_concurrency=4, seed=seed)


def _cached(label: str) -> Callable[[Mapping[str, Figures]], float]:
    return lambda runs: float(runs[label]["cached_percent"])


CACHE = Scenario(
    name="cache",
    description="what share of prompt tokens four classic workloads find in the prefix cache, the first request included",
    model=LONG,
    runs=lambda seed: (
        Run(label="growing file", traffic=_growing_file(seed)),
        Run(label="common system prompt", traffic=_common_system(seed)),
        Run(label="retrieval", traffic=_retrieval(seed)),
        Run(label="retrieval, caching off", traffic=_retrieval(seed + 1000), config=_NO_CACHE),
        Run(label="code base", traffic=_code_base(seed)),
    ),
    claims=(
        Claim(text="growing file: cached", value=_cached("growing file"), at_least=90, unit="%"),
        Claim(text="common system prompt: cached", value=_cached("common system prompt"), at_least=40, unit="%"),
        Claim(text="retrieval: cached", value=_cached("retrieval"), at_most=15, unit="%"),
        Claim(
            text="retrieval: time against caching off",
            value=lambda runs: runs["retrieval"]["duration"] / runs["retrieval, caching off"]["duration"],
            at_most=1.03,
            unit="x",
        ),
        Claim(text="code base: cached", value=_cached("code base"), at_least=95, unit="%"),
    ),
)


def _warm_and_cold(seed: int) -> tuple[Run, ...]:
    jobs = [
        Job(
            prompt=((f"prefix {number}", 2000), (f"own {kind} {number}", 30)), output_tokens=8, session="one", kind=kind
        )
        for kind in ("cold", "warm")
        for number in range(6)
    ]
    return (Run(label="cold, then warm", traffic=Traffic(name="warm", jobs=tuple(jobs), seed=seed)),)


WARM = Scenario(
    name="warm",
    description="time to the first token of a prefix of 2,000 words with 30 new ones, the first time and again",
    runs=_warm_and_cold,
    claims=(
        Claim(
            text="median TTFT, warm against cold",
            value=lambda runs: (
                100
                * _kind(runs["cold, then warm"], "warm")["median_ttft_ms"]
                / _kind(runs["cold, then warm"], "cold")["median_ttft_ms"]
            ),
            at_most=8,
            unit="%",
        ),
    ),
)


_PROMPTS_FIRST = Config(scheduler=SchedulerConfig(long_prefill_token_threshold=0))
"""Long prompts as fast as they can be computed, so that all are alive before the first one ends."""


def _sharing(seed: int, *, shared: bool) -> Traffic:
    jobs = [
        Job(
            prompt=(("prompt" if shared else f"prompt {number}", 1500), (f"own {number}", 16)),
            output_tokens=128,
            kind="shared" if shared else "unshared",
        )
        for number in range(16)
    ]
    return Traffic(name="sharing", jobs=tuple(jobs), seed=seed)


SHARING = Scenario(
    name="sharing",
    description="KV memory of 16 live requests whose prompts of 1,500 words are the same, against 16 different ones",
    runs=lambda seed: (
        Run(label="shared", traffic=_sharing(seed, shared=True), config=_PROMPTS_FIRST),
        Run(label="unshared", traffic=_sharing(seed, shared=False), config=_PROMPTS_FIRST),
    ),
    claims=(
        Claim(
            text="peak KV use, shared against unshared",
            value=lambda runs: (
                100 * runs["shared"]["engine"]["kv_usage_max"] / runs["unshared"]["engine"]["kv_usage_max"]
            ),
            at_most=20,
            unit="%",
        ),
    ),
)


# --- scheduling -----------------------------------------------------------------------------------------------------

_MIXED_S = 40.0


def _users(
    seed: int, name: str, number: int, *, words: tuple[int, int], output: tuple[int, int], turns: int, tenant: str = ""
) -> list[Job]:
    """People who ask again as soon as they are answered, begin within the first three seconds, and differ in what they ask (from, to)."""
    draw = random.Random(f"{seed}/{name}")
    return [
        Job(
            prompt=((f"{name} {user}.{turn}", draw.randint(*words)),),
            output_tokens=draw.randint(*output),
            session=f"{name} {user}",
            at_s=start_s,
            tenant=tenant,
            kind=name,
        )
        for user, start_s in enumerate(draw.uniform(0, 3) for _ in range(number))
        for turn in range(turns)
    ]


def _mixed(seed: int, *, long: bool) -> Traffic:
    """Eight chats and, with `long`, one distinct prompt of 2,000 words every 6 seconds."""
    jobs = _users(seed, "chats", 8, words=(50, 150), output=(64, 128), turns=200)
    if long:
        jobs += [
            Job(prompt=((f"long {number}", 2000),), output_tokens=16, at_s=4.0 + 6 * number, kind="long")
            for number in range(int((_MIXED_S - 4) / 6) + 1)
        ]
    return Traffic(name="mixed", jobs=tuple(jobs), until_s=_MIXED_S, seed=seed)


def _itl_ratio(label: str) -> Callable[[Mapping[str, Figures]], float]:
    def ratio(runs: Mapping[str, Figures]) -> float:
        return float(_kind(runs[label], "chats")["p95_itl_ms"] / _kind(runs["chats alone"], "chats")["p95_itl_ms"])

    return ratio


MIXED = Scenario(
    name="mixed",
    description="8 chats, and beside them a distinct prompt of 2,000 words every 6 s, with chunked prefill and without",
    runs=lambda seed: (
        Run(label="chats alone", traffic=_mixed(seed, long=False)),
        Run(label="with long prompts", traffic=_mixed(seed, long=True)),
        Run(
            label="with long prompts, chunking off",
            traffic=_mixed(seed, long=True),
            config=Config(scheduler=SchedulerConfig(enable_chunked_prefill=False)),
        ),
    ),
    claims=(
        Claim(
            text="p95 ITL of chats beside long prompts, against alone",
            value=_itl_ratio("with long prompts"),
            at_most=3,
            unit="x",
        ),
        Claim(
            text="p95 TTFT of long prompts",
            value=lambda runs: _kind(runs["with long prompts"], "long")["p95_ttft_ms"] / 1e3,
            at_most=6,
            unit="s",
        ),
        Claim(text="the first with chunking off", value=_itl_ratio("with long prompts, chunking off"), unit="x"),
        Claim(
            text="longest ITL of chats, chunking off against on",
            value=lambda runs: (
                _kind(runs["with long prompts, chunking off"], "chats")["max_itl_ms"]
                / _kind(runs["with long prompts"], "chats")["max_itl_ms"]
            ),
            unit="x",
        ),
    ),
)


_SHORT_S = 34.0


def _short(seed: int) -> tuple[Run, ...]:
    """Short prompts that come at random, two in a second, while 48 answers are generated; the same beside 16 and three long prompts."""
    draw = random.Random(f"{seed}/short")
    shorts: list[Job] = []
    at_s = 5.0
    while (at_s := at_s + draw.expovariate(2.0)) < _SHORT_S:
        words = draw.randint(1, 64)
        shorts.append(Job(prompt=((f"short {at_s}", words),), output_tokens=8, at_s=at_s, kind="short"))

    def run(label: str, num_streams: int, num_long: int) -> Run:
        load = _users(seed, "streams", num_streams, words=(32, 32), output=(150, 300), turns=40)
        load += _users(seed, "long", num_long, words=(1500, 3000), output=(4, 4), turns=40)
        return Run(label=label, traffic=Traffic(name="short", jobs=(*load, *shorts), until_s=_SHORT_S, seed=seed))

    return run(_BESIDE_STREAMS, 48, 0), run(_BESIDE_LONG, 16, 3)


_BESIDE_STREAMS, _BESIDE_LONG = "beside 48 answers", "beside 16 answers and long prompts"


def _in_steps(label: str) -> Callable[[Mapping[str, Figures]], float]:
    return lambda runs: float(
        _kind(runs[label], "short")["p95_ttft_ms"] / _kind(runs[label], "streams")["median_itl_ms"]
    )


SHORT = Scenario(
    name="short",
    description="prompts of 1 to 64 words that come to a loaded server: the time to their first token, in steps of the load",
    runs=_short,
    claims=tuple(
        Claim(
            text=f"p95 TTFT of short prompts {label}, against the median step",
            value=_in_steps(label),
            at_most=2.3,
            unit="x",
        )
        for label in (_BESIDE_STREAMS, _BESIDE_LONG)
    ),
)

_FAIR_S = 35.0
_SLOTS = 16


def _tenants(seed: int, *, flood: bool, other: bool) -> Traffic:
    """Tenant A keeps twice as many requests in the server as it has slots. Tenant B asks one thing after another."""
    jobs: list[Job] = []
    if flood:
        jobs += _users(seed, "A", 2 * _SLOTS, words=(32, 128), output=(64, 128), turns=60, tenant="a")
    if other:
        jobs += [
            Job(
                prompt=((f"b {turn}", 100),),
                output_tokens=16,
                session="b",
                at_s=3.0,
                think_s=0.3,
                tenant="b",
                kind="B",
            )
            for turn in range(200)
        ]
    return Traffic(name="fairness", jobs=tuple(jobs), until_s=_FAIR_S, seed=seed)


def _policy(policy: Any) -> Config:
    return Config(
        scheduler=SchedulerConfig(max_num_seqs=_SLOTS, scheduling_policy=policy),
        server=ServerConfig(api_key=("a:key-of-a", "b:key-of-b")),
    )


FAIRNESS = Scenario(
    name="fairness",
    description="tenant A floods the server with twice as many requests as it has slots; tenant B asks one at a time",
    runs=lambda seed: (
        Run(label="B alone", traffic=_tenants(seed, flood=False, other=True), config=_policy("fair")),
        Run(label="A alone", traffic=_tenants(seed, flood=True, other=False), config=_policy("fair")),
        Run(label="A and B, fair", traffic=_tenants(seed, flood=True, other=True), config=_policy("fair")),
        Run(label="A and B, fcfs", traffic=_tenants(seed, flood=True, other=True), config=_policy("fcfs")),
    ),
    claims=(
        Claim(
            text="p95 TTFT of B beside A, against 1.5 times B alone plus two loaded steps",
            value=lambda runs: (
                _kind(runs["A and B, fair"], "B")["p95_ttft_ms"]
                / (1.5 * runs["B alone"]["p95_ttft_ms"] + 2 * _kind(runs["A and B, fair"], "A")["median_itl_ms"])
            ),
            at_most=1,
            unit="x",
        ),
        Claim(
            text="tokens per second of A and B, against A alone",
            value=lambda runs: (
                100 * runs["A and B, fair"]["total_token_throughput"] / runs["A alone"]["total_token_throughput"]
            ),
            at_least=95,
            unit="%",
        ),
        Claim(
            text="p95 TTFT of B, fcfs against fair",
            value=lambda runs: (
                _kind(runs["A and B, fcfs"], "B")["p95_ttft_ms"] / _kind(runs["A and B, fair"], "B")["p95_ttft_ms"]
            ),
            unit="x",
        ),
    ),
)

RACE = Scenario(
    name="race",
    description="the workloads that engines are compared on, one after another",
    runs=lambda seed: tuple(Run(label=name, traffic=race(name, seed)) for name in WORKLOADS),
    claims=(),
)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for scenario in (CACHE, WARM, SHARING, MIXED, SHORT, FAIRNESS, RACE)
}
