"""`octavo bench structured`: outputs under random schemas, all validated; what they cost; and whether a large schema holds up others."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli.bench_output import (
    add_result_flags,
    add_server_flags,
    count_bar,
    server_key,
    warn_if_loaded,
    write_result,
)

_OPTIONS = ("pairs", "concurrency", "max_tokens", "rounds", "schema_bytes", "seed")


def add_structured(verbs: Any) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "structured",
        help="validity, speed and side effects of structured outputs at a running server",
        description=__doc__,
    )
    add_server_flags(parser)
    for name, default, text in (
        ("pairs", 2000, "random pairs of schema and seed"),
        ("concurrency", 16, "requests at once"),
        ("max-tokens", 300, "tokens after which an output is cut short"),
        ("rounds", 5, "rounds of speed with and without a schema, and of a large schema"),
        ("schema-bytes", 300_000, "size of the large schema"),
        ("seed", 1, "equal seeds ask the same"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    add_result_flags(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import asyncio

    warn_if_loaded()
    return asyncio.run(_measure(arguments))


async def _measure(arguments: argparse.Namespace) -> int:
    import aiohttp
    import msgspec

    from octavo.bench.http.client import first_model
    from octavo.bench.http.structured import Server, check_validity, measure_delay, measure_speed
    from octavo.bench.results import header

    key = server_key(arguments)
    model = arguments.model_name or await first_model(arguments.base_url, key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    result: dict[str, Any] = header("structured", options) | {"model": model}
    failed = False
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        server = Server(session, arguments.base_url, model)
        if arguments.rounds:
            with count_bar() as progress:
                delay = await measure_delay(
                    server,
                    rounds=arguments.rounds,
                    num_streams=4,
                    schema_bytes=arguments.schema_bytes,
                    seed=arguments.seed,
                    progress=progress,
                )
            result["delay"] = msgspec.to_builtins(delay)
            print(
                f"a new schema of {delay.schema_bytes} bytes: answered {delay.answers} after "
                f"{', '.join(f'{one:.1f}' for one in delay.answer_s)} s; of {delay.num_streams} streams with a gap of "
                f"{delay.usual_gap_s * 1e3:.0f} ms the longest was {_ms(delay.longest_gap_before_s)} ms before and "
                f"{_ms(delay.longest_gap_beside_s)} ms beside it"
            )
            with count_bar() as progress:
                speed = await measure_speed(
                    server,
                    rounds=arguments.rounds,
                    num_streams=arguments.concurrency,
                    num_tokens=128,
                    progress=progress,
                )
            result["speed"] = {**msgspec.to_builtins(speed), "share": speed.share}
            print(
                f"{speed.num_streams} streams: {_rates(speed.with_schema)} tok/s with a schema, {_rates(speed.without)} without; "
                f"medians {speed.share:.1%}"
            )
        if arguments.pairs:
            with count_bar() as progress:
                validity = await check_validity(
                    server, arguments.pairs, seed=arguments.seed, concurrency=arguments.concurrency,
                    max_tokens=arguments.max_tokens, progress=progress,
                )  # fmt: skip
            result["validity"] = msgspec.to_builtins(validity)
            failed = bool(validity.invalid or validity.refused)
            print(
                f"{validity.num_pairs} pairs in {validity.total_s:.0f} s: {validity.num_finished} finished, "
                f"{len(validity.invalid)} of them invalid, {validity.num_cut_short} cut short, {len(validity.refused)} refused; "
                f"slowest {validity.slowest_s:.1f} s"
            )
            for line in (validity.invalid + validity.refused)[:20]:
                print(f"  {line!r}")
    write_result(result, arguments)
    return int(failed)


def _ms(gaps_s: list[float]) -> str:
    return ", ".join(f"{gap_s * 1e3:.0f}" for gap_s in gaps_s)


def _rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:.0f}" for rate in rates)
