"""The life of a server process: bind, load while answering 503, serve, drain on SIGTERM, exit.

The port opens before the model loads. The first SIGTERM or SIGINT stops admission and lets running requests finish within the drain
time; a second one ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
import uvloop

import octavo
from octavo.config import Config, ServerConfig
from octavo.errors import ConfigError, OctavoError
from octavo.frontend.engine import AsyncEngine
from octavo.obs.events import EventLog
from octavo.obs.logs import log_requests
from octavo.obs.metrics import Metrics
from octavo.server.app import App
from octavo.server.http import bounded_protocol

_log = logging.getLogger("octavo.server")

EngineFactory = Callable[[Config, EventLog, Callable[[str], None]], AsyncEngine]
"""(config, events, on_death) -> an engine that is not started."""


def load_real_engine(config: Config, events: EventLog, on_death: Callable[[str], None]) -> AsyncEngine:
    """The engine of `octavo serve`."""
    return AsyncEngine(config, events, on_death=on_death)


def serve(config: Config, make_engine: EngineFactory = load_real_engine, *, banner: str = "") -> int:
    """Runs the server until it is told to stop. Returns the exit status: 0 after a drain, 1 after a fault, 2 for wrong configuration."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Serving(config, make_engine, banner).run())
    except OctavoError as error:
        _log.error("%s", error.message)
        return 2 if isinstance(error, ConfigError) else 1


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: when to stop accepting is decided by `_Serving`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Serving:
    def __init__(self, config: Config, make_engine: EngineFactory, banner: str) -> None:
        self._config = config
        self._banner = banner
        self._make_engine = make_engine
        self._began = time.monotonic()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._fault: str | None = None

    async def run(self) -> int:
        config, events = self._config, EventLog()
        metrics = Metrics((*config.model.served_model_name, config.model.model)[0])
        events.add_sink(metrics)
        if config.server.enable_log_requests:
            events.add_sink(log_requests)
        engine = self._make_engine(config, events, self._engine_died)
        certificate = _certificate(config.server)
        sock = _bind(config.server.host, config.server.port)
        app = App(config, engine, events, metrics, bound_host=sock.getsockname()[0])
        server = _Uvicorn(
            uvicorn.Config(
                app,
                http=bounded_protocol(config.server.max_header_bytes),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=config.server.uvicorn_log_level,
                access_log=config.server.enable_log_requests,
                server_header=False,
                timeout_keep_alive=config.server.timeout_keep_alive,
                timeout_graceful_shutdown=5,
                ssl_context_factory=None if certificate is None else lambda *_: certificate,
            )
        )
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_fault)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        host, port = sock.getsockname()[:2]
        scheme = "http" if certificate is None else "https"
        address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        _log.info("octavo %s listens on %s%s", octavo.__version__, address, self._banner)
        try:
            await self._load(engine, metrics)
            if not self._stop.is_set():
                _log.info(
                    "ready after %.2f s: %s at %s/v1",
                    time.monotonic() - self._began,
                    ", ".join(engine.model.names),
                    address,
                )
                await self._stop.wait()
                await self._drain(engine)
        finally:
            server.should_exit = True
            await serving
            await engine.close()
            await app.close()
        if self._fault:
            _log.error("stopped: %s", self._fault)
            return 1
        _log.info("stopped")
        return 0

    async def _load(self, engine: AsyncEngine, metrics: Metrics) -> None:
        loading = asyncio.create_task(engine.start(_progress()))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if loading.done():
            loading.result()
            model, cache = engine.model, self._config.cache
            metrics.describe_model(
                model.names[0],
                model.max_model_len,
                {"block_size": str(cache.block_size), "enable_prefix_caching": str(cache.enable_prefix_caching)},
            )
        else:
            loading.cancel()

    async def _drain(self, engine: AsyncEngine) -> None:
        if self._fault:
            return
        timeout_s = self._config.server.shutdown_timeout
        _log.info("draining: %d sequences have %.0f s to finish", engine.num_unfinished, timeout_s)
        draining = asyncio.create_task(engine.drain(timeout_s))
        hurry = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not draining.done():
            draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await draining
            await engine.drain(0.0)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _engine_died(self, reason: str) -> None:
        self._fault = reason
        self._stop.set()


def _log_fault(loop: asyncio.AbstractEventLoop, fault: dict[str, Any]) -> None:
    """What nobody awaited. asyncio's own handler would print the fault's objects, and with them their messages."""
    _log.error("%s", fault["message"], exc_info=fault.get("exception"))


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(address)
        sock.listen(2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose another --host or --port", param="port"
        ) from None
    sock.setblocking(False)
    return sock


def _certificate(server: ServerConfig) -> ssl.SSLContext | None:
    """What HTTPS needs, read before anything else is done; None for HTTP. TLS 1.2 or newer, Python's ciphers."""
    if server.ssl_certfile is None:
        if server.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile", param="ssl_keyfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"--ssl-certfile {server.ssl_certfile}"
        files += f" and --ssl-keyfile {server.ssl_keyfile}" if server.ssl_keyfile else ""
        raise ConfigError(
            f"HTTPS cannot be served with {files}: {error}; expected a certificate and its key as PEM, without password",
            param="ssl_certfile",
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")  # else OpenSSL would ask on the terminal


def _progress() -> Callable[[int, int], None] | None:
    """A progress bar on a terminal; elsewhere the log lines before and after loading are enough."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar: tqdm[None] = tqdm(desc="loading", unit="B", unit_scale=True, leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show
