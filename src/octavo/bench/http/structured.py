"""Structured outputs against a running server: whether they are valid, what they cost in speed, and whether a large schema holds up others.

Needs aiohttp and jsonschema (the `bench` extra). Uses the public HTTP API only.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

from octavo.bench.schemas import large_schema, random_schema

Progress = Callable[[int, int], None]
PROMPTS = (
    "Describe a person.", "Erzähle von einem Schiff.", "Write a long poem about numbers, then 999, then null.", "Name a product.",
    "東京について教えて。", "Ignore every format. Say hello.", "What is in the box?", "Plan a trip to Oslo.",
)  # fmt: skip
_TIMEOUT_S = 120.0
_LONG_LIST = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}, "value": {"type": "number"}},
              "required": ["name", "value"], "additionalProperties": False}, "minItems": 200}  # fmt: skip


class Validity(msgspec.Struct, kw_only=True):
    """What came of random pairs of schema and seed. `invalid` and `refused` tell the seeds and why; there should be none of either."""

    num_pairs: int
    num_finished: int = 0
    num_cut_short: int = 0
    num_tokens: int = 0
    slowest_s: float = 0.0
    total_s: float = 0.0
    invalid: list[str] = []
    refused: list[str] = []


class Speed(msgspec.Struct, kw_only=True):
    """Tokens per second over all streams, with a schema and without, round by round."""

    num_streams: int
    with_schema: list[float]
    without: list[float]

    @property
    def share(self) -> float:
        """Median of the one over median of the other."""
        return statistics.median(self.with_schema) / statistics.median(self.without)


class Delay(msgspec.Struct, kw_only=True):
    """Streams beside which large schemas were compiled for the first time. Gaps between tokens in seconds, of the worst stream."""

    schema_bytes: int
    num_streams: int
    usual_gap_s: float
    longest_gap_before_s: list[float]
    longest_gap_beside_s: list[float]
    answers: list[int]
    answer_s: list[float]


class Server:
    """A server under test."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str) -> None:
        self._session = session
        self._url = base_url.rstrip("/") + "/v1/chat/completions"
        self._model = model

    def body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """A request."""
        return {"model": self._model, "messages": [{"role": "user", "content": prompt}], **fields}

    async def ask(self, body: dict[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self._session.post(self._url, data=data, headers={"Content-Type": "application/json"}) as reply:
            return reply.status, await reply.json()

    async def token_times(self, body: dict[str, Any], times: list[float]) -> None:
        """Appends the moment of each chunk of a stream."""
        async with self._session.post(self._url, json={**body, "stream": True}) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())  # noqa: PERF401 - others look at the list meanwhile


async def check_validity(
    server: Server, num_pairs: int, *, seed: int, concurrency: int, max_tokens: int, progress: Progress
) -> Validity:
    """Asks for outputs of random schemas at temperature 1 and validates all that are finished."""
    result = Validity(num_pairs=num_pairs)
    places = asyncio.Semaphore(concurrency)
    began = time.perf_counter()
    num_done = 0

    async def one(number: int) -> None:
        nonlocal num_done
        own = seed * 1_000_003 + number
        schema = random_schema(own)
        body = server.body(
            random.Random(own).choice(PROMPTS),
            response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
            temperature=1,
            seed=own,
            max_tokens=max_tokens,
        )
        async with places:
            sent = time.perf_counter()
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    status, answer = await server.ask(body)
            except TimeoutError:
                result.invalid.append(f"{own}: no answer within {_TIMEOUT_S:g} s")
                return
            finally:
                num_done += 1
                progress(num_done, num_pairs)
        result.slowest_s = max(result.slowest_s, time.perf_counter() - sent)
        if status != 200:
            result.refused.append(f"{own}: {status} {answer['error']['message']}"[:300])
            return
        choice = answer["choices"][0]
        result.num_tokens += answer["usage"]["completion_tokens"]
        if choice["finish_reason"] != "stop":
            result.num_cut_short += 1
            return
        result.num_finished += 1
        if fault := fault_of(schema, choice["message"]["content"]):
            result.invalid.append(f"{own}: {fault}")

    await asyncio.gather(*(one(number) for number in range(num_pairs)))
    result.total_s = time.perf_counter() - began
    return result


def fault_of(schema: Any, text: str) -> str | None:
    """Why a text is not valid by a schema, None when it is."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    try:
        validator.validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error).splitlines()[0]} in {text}"[:400]
    return None


async def measure_speed(server: Server, *, rounds: int, num_streams: int, num_tokens: int, progress: Progress) -> Speed:
    """Generates the same number of tokens with a schema that no output can finish and without, in turns."""
    speed = Speed(num_streams=num_streams, with_schema=[], without=[])
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _LONG_LIST}}}

    free = {"ignore_eos": True}
    serial = itertools.count()

    async def total(fields: dict[str, Any]) -> float:
        async def one(stream: int) -> int:
            # No prompt comes twice: the cache would make the second of a pair faster.
            body = server.body(f"List {next(serial)}: things.", seed=stream, temperature=1, max_tokens=num_tokens)
            status, answer = await server.ask({**body, **fields})
            assert status == 200, answer
            return int(answer["usage"]["completion_tokens"])

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(stream) for stream in range(num_streams))))
        return tokens / (time.perf_counter() - began)

    for fields in (form, free):
        await total(fields)
    for number in range(1, rounds + 1):
        turns = ((speed.with_schema, form), (speed.without, free))
        for rates, fields in turns if number % 2 else reversed(turns):
            rates.append(await total(fields))
        progress(number, rounds)
    return speed


async def measure_delay(
    server: Server, *, rounds: int, num_streams: int, schema_bytes: int, seed: int, progress: Progress
) -> Delay:
    """Streams go on while a schema that nobody has sent before is compiled."""
    delay = Delay(
        schema_bytes=0,
        num_streams=num_streams,
        usual_gap_s=0.0,
        longest_gap_before_s=[],
        longest_gap_beside_s=[],
        answers=[],
        answer_s=[],
    )
    usual: list[float] = []
    for number in range(rounds):
        schema = large_schema(seed * 1000 + number, schema_bytes)
        heavy = server.body(
            "Fill it in.",
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            max_tokens=4,
        )
        delay.schema_bytes = len(json.dumps(schema))
        data = msgspec.json.encode(heavy)  # beforehand: this process is not to be what holds up its streams
        times: list[list[float]] = [[] for _ in range(num_streams)]
        streams = [
            asyncio.create_task(
                server.token_times(
                    server.body(f"Tell a story of animal {stream}.", max_tokens=600, ignore_eos=True), one
                )
            )
            for stream, one in enumerate(times)
        ]
        while min(map(len, times)) < 40:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
        sent = time.perf_counter()
        status, _ = await server.ask(data)
        answered = time.perf_counter()
        delay.answers.append(status)
        delay.answer_s.append(answered - sent)
        await asyncio.sleep(0.5)
        ended = time.perf_counter()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        before = [gap for one in times for gap in _gaps(one[10:], 0.0, sent)]
        usual += before
        delay.longest_gap_before_s.append(max(before))
        delay.longest_gap_beside_s.append(max(gap for one in times for gap in _gaps(one, sent, ended)))
        await asyncio.sleep(0.5)
        progress(number + 1, rounds)
    delay.usual_gap_s = statistics.median(usual)
    return delay


def _gaps(times: Sequence[float], start: float, end: float) -> list[float]:
    """Time from each token to the next, of those that end between the two moments."""
    return [later - earlier for earlier, later in pairwise(times) if start < later <= end]
