"""The workloads that engines are compared on, as data: how many requests, how many at once, how long.

Prompts are words drawn from one list by a seed, so that every engine gets the same text and every round another one. Knows no engine
and no server.
"""

from __future__ import annotations

import random

import msgspec

WORDS = tuple(
    """time year people way day man thing woman life child world school state family student group country problem hand part place
    case week company system program question work government number night point home water room mother area money story fact month
    lot right study book eye job word business issue side kind head house service friend father power hour game line end member law
    car city community name president team minute idea body information back parent face others level office door health person art
    war history party result change morning reason research girl guy moment air teacher force education""".split()
)
"""Common English nouns, in the order that the project's load generator has them: the order decides what a seed draws."""

WARM_UP_SEED = 999
"""Seed of prompts that are run before the clock starts."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` prompts of `words` words after `shared_words` that all share, `concurrency` at once, `output` tokens each."""

    name: str
    description: str
    requests: int
    concurrency: int
    words: int
    output: int
    shared_words: int = 0

    def prompts(self, seed: int) -> list[str]:
        """The prompts of a seed: first the shared words are drawn, then each prompt's own."""
        draw = random.Random(seed).choice
        shared = [draw(WORDS) for _ in range(self.shared_words)]
        return [" ".join([*shared, *(draw(WORDS) for _ in range(self.words))]) for _ in range(self.requests)]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="single",
            description="one stream, about 125 tokens in and 128 out",
            requests=4,
            concurrency=1,
            words=120,
            output=128,
        ),
        Workload(
            name="c16",
            description="16 streams at once, about 210 tokens in and 64 out",
            requests=48,
            concurrency=16,
            words=200,
            output=64,
        ),
        Workload(
            name="c64",
            description="64 streams at once, about 67 tokens in and 64 out",
            requests=128,
            concurrency=64,
            words=64,
            output=64,
        ),
        Workload(
            name="prompt",
            description="one prompt of about 500 tokens at a time: its time to first token counts",
            requests=8,
            concurrency=1,
            words=490,
            output=2,
        ),
        Workload(
            name="prefix",
            description="4 streams that share about 900 tokens, 30 of their own in and 16 out",
            requests=24,
            concurrency=4,
            words=30,
            output=16,
            shared_words=900,
        ),
    )
}

WARM_UP = Workload(name="warm-up", description="before the clock starts", requests=2, concurrency=1, words=40, output=8)
