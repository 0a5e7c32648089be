"""Where `chat` and `complete` get their text from: a model loaded here, or a running server."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import urllib.parse
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from octavo.config import Config
from octavo.contracts import FinishReason
from octavo.errors import ConfigError, EngineError, ModelUnavailableError, OctavoError


class Talker(Protocol):
    """A source of streamed text. Closing the iterator early stops the generation."""

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Iterator[str]:
        """Pieces of the answer to a conversation."""
        ...

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Iterator[str]:
        """Pieces of a text's continuation."""
        ...


class LocalTalker:
    """Loads the model in this process. Use as a context manager."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._runner = asyncio.Runner()

    def __enter__(self) -> LocalTalker:
        from octavo.frontend.engine import AsyncEngine
        from octavo.obs.events import EventLog

        self._engine = AsyncEngine(self._config, EventLog())
        self._runner.run(self._engine.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Iterator[str]:
        """Pieces of the answer to a conversation."""
        params = self._engine.model.sampling_params(**{"max_tokens": None, **sampling})
        return self._pieces(self._engine.builder.build_chat(messages, params))

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Iterator[str]:
        """Pieces of a text's continuation."""
        return self._pieces(self._engine.builder.build(prompt, self._engine.model.sampling_params(**sampling)))

    def _pieces(self, prepared: Any) -> Iterator[str]:
        async def stream() -> AsyncIterator[str]:
            async with self._engine.submit(prepared) as handle:
                async for delta in handle:
                    if delta.finish_reason is FinishReason.ERROR:
                        raise delta.error or EngineError("the engine failed; try again")
                    if delta.text:
                        yield delta.text

        pieces = stream()
        try:
            while True:
                step = _next(pieces)
                try:
                    piece = self._runner.run(step)
                except StopAsyncIteration:
                    return
                finally:
                    step.close()  # it has not begun if Ctrl-C came at once
                yield piece
        finally:
            self._runner.run(_close(pieces))


async def _next(pieces: AsyncIterator[str]) -> str:
    return await anext(pieces)


async def _close(pieces: Any) -> None:
    await pieces.aclose()


class RemoteTalker:
    """Talks to a running server, octavo's or another with OpenAI's API."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        try:
            parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if host is None or parts.scheme not in ("http", "https"):
            raise ConfigError(f"--url is {url!r}; expected http://HOST:PORT", param="url")
        self._secure, self._host, self._port = parts.scheme == "https", host, port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._model = model

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Iterator[str]:
        """Pieces of the answer to a conversation."""
        for choice in self._stream("/v1/chat/completions", {"messages": list(messages), **sampling}):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Iterator[str]:
        """Pieces of a text's continuation."""
        for choice in self._stream("/v1/completions", {"prompt": prompt, **sampling}):
            yield choice["text"]

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=600)

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        connection = self._connect()
        try:
            model = self._model or json.loads(self._open(connection, "GET", "/v1/models").read())["data"][0]["id"]
            reply = self._open(connection, "POST", path, {**body, "model": model, "stream": True})
            for line in reply:
                payload = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if payload == b"[DONE]":
                    return
                event = json.loads(payload)
                if "error" in event:
                    raise OctavoError(event["error"]["message"])
                yield from event["choices"]
            raise ModelUnavailableError("the server broke off in the middle of its answer")
        except OSError as error:
            raise ModelUnavailableError(
                f"the server does not answer: {error}; is it running, and is --url right?"
            ) from None
        except (http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise ModelUnavailableError(
                f"what answers is no OpenAI server, or broke off: {error!r}; is --url right?"
            ) from None
        finally:
            connection.close()

    def _open(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        connection.request(method, self._base + path, None if body is None else json.dumps(body), self._headers)
        reply = connection.getresponse()
        if reply.status != 200:
            text = reply.read(10_000).decode("utf-8", "replace")
            try:
                text = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                text = text[:200]
            raise OctavoError(f"the server answers {reply.status}: {text}")
        return reply


def show(pieces: Iterator[str], *, interruptible: bool = False) -> str:
    """Writes pieces to stdout as they come and returns them joined. Closes the iterator however it ends.

    With `interruptible` Ctrl-C ends the text instead of the program.
    """
    parts: list[str] = []
    try:
        for piece in pieces:
            parts.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not interruptible:
            raise
    finally:
        if isinstance(pieces, Generator):
            pieces.close()
    return "".join(parts)
