"""An asyncio client that sends traffic to an OpenAI-compatible server and notes when each token came. Needs aiohttp (the `bench` extra).

It streams every request. Token counts are the server's own, from the usage it reports. Knows no figures and no octavo but its vocabulary
of traffic.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from octavo.bench.figures import Outcome
from octavo.bench.traffic import Job, Traffic, sessions
from octavo.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

Progress = Callable[[int, int], None]
"""Called with (jobs ended, jobs in all)."""
Backend = Literal["openai", "openai-chat"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server and how it is asked. `keys`: API keys by tenant; "" is for all others. `extra_body` goes into every request."""

    base_url: str
    model: str
    backend: Backend = "openai"
    keys: Mapping[str, str] = {}
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = {}
    timeout_s: float = 3600.0

    @property
    def url(self) -> str:
        """Where requests go."""
        path = "completions" if self.backend == "openai" else "chat/completions"
        return f"{self.base_url.rstrip('/')}/v1/{path}"

    def headers(self, tenant: str) -> dict[str, str]:
        """With the key of a tenant, if there is one."""
        key = self.keys.get(tenant, self.keys.get(""))
        return {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})

    def body(self, traffic: Traffic, job: Job) -> dict[str, Any]:
        """The request of a job."""
        text = traffic.text(job)
        asked: dict[str, Any] = (
            {"prompt": text} if self.backend == "openai" else {"messages": [{"role": "user", "content": text}]}
        )
        asked |= {"model": self.model, "max_tokens": job.output_tokens, "temperature": self.temperature, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if job.priority:
            asked["priority"] = job.priority
        return asked | dict(self.extra_body)


async def drive(traffic: Traffic, target: Target, progress: Progress | None = None) -> list[Outcome]:
    """Sends all jobs when they are due and returns the stories of those sent, in order. A failed request is a story, no exception."""
    import aiohttp

    traffic.check()
    client = _Client(traffic, target, progress or (lambda *_: None))
    # No limit on connections but the traffic's own. Connections are kept, as clients' libraries do.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=60)
    ) as session:
        client.begin()
        await asyncio.gather(*(client.run_session(session, chain) for chain in sessions(traffic.jobs)))
    return [outcome for index, outcome in enumerate(client.outcomes) if index in client.sent]


async def first_model(base_url: str, key: str | None = None) -> str:
    """The name of the model that a server serves. Raises ConfigError when it cannot be asked."""
    try:
        listing = await fetch(base_url, "/v1/models", key)
        return str(msgspec.json.decode(listing)["data"][0]["id"])
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError):
        raise ConfigError(f"{base_url} does not list its models; name one with --model", param="model") from None


async def fetch(base_url: str, path: str, key: str | None = None) -> bytes:
    """The body of a GET. Raises ConfigError when the server cannot be reached or refuses."""
    import aiohttp

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.get(base_url.rstrip("/") + path, headers=headers) as reply,
        ):
            body = await reply.read()
            if reply.status != 200:
                raise ConfigError(f"{base_url}{path} answered {reply.status}: {body[:200].decode(errors='replace')}")
            return body
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"no server answers at {base_url} ({error}); start one or name another with --base-url", param="base_url"
        ) from None


class _Client:
    def __init__(self, traffic: Traffic, target: Target, progress: Progress) -> None:
        self._traffic, self._target, self._progress = traffic, target, progress
        self.outcomes = [Outcome(kind=job.kind, tenant=job.tenant, sent_s=0.0) for job in traffic.jobs]
        self._places = asyncio.Semaphore(traffic.max_concurrency or len(traffic.jobs))
        self.sent: set[int] = set()
        self._num_ended = 0
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def run_session(self, session: aiohttp.ClientSession, chain: list[int]) -> None:
        """Jobs one after another."""
        for position, index in enumerate(chain):
            job = self._traffic.jobs[index]
            wait_s = max(job.at_s - self._now(), job.think_s if position else 0.0)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            async with self._places:
                if self._now() > self._traffic.until_s:
                    return
                self.sent.add(index)
                await self._send(session, job, self.outcomes[index])
            self._num_ended += 1
            self._progress(self._num_ended, len(self.outcomes))

    async def _send(self, session: aiohttp.ClientSession, job: Job, outcome: Outcome) -> None:
        import aiohttp

        target = self._target
        body = msgspec.json.encode(target.body(self._traffic, job))
        outcome.sent_s = outcome.last_s = self._now()
        try:
            async with session.post(target.url, data=body, headers=target.headers(job.tenant)) as reply:
                if reply.status != 200:
                    outcome.error = f"{reply.status} {(await reply.text())[:200]}"
                    return
                async for line in reply.content:
                    if line.startswith(b"data:"):
                        payload = line[5:].strip()
                        if payload == b"[DONE]":
                            break
                        self._event(_EVENTS.decode(payload), outcome)
            if outcome.first_s is None and outcome.error is None:
                outcome.error = "the stream ended without a token"
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:200]

    def _event(self, event: _Event, outcome: Outcome) -> None:
        if event.error is not None:
            outcome.error = str(event.error)[:200]
        if any(choice.said for choice in event.choices):
            outcome.token(self._now())
            outcome.output_tokens += 1
        if event.usage is not None:
            usage = event.usage
            outcome.prompt_tokens, outcome.output_tokens = usage.prompt_tokens, usage.completion_tokens
            outcome.cached_tokens = (usage.prompt_tokens_details or _Details()).cached_tokens or 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def said(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.tool_calls)))


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)
