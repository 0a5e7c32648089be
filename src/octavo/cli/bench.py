"""`octavo bench`: measure this machine, its kernels, throughput and servers; simulate; make up models; report the results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.cli.bench_load import add_costs, add_scenario, add_serve, add_simulate
from octavo.cli.bench_output import add_result_flags, bar, byte_bar, warn_if_loaded, write_result
from octavo.cli.bench_structured import add_structured
from octavo.cli.flags import Parser, add_flags
from octavo.errors import ConfigError

_ENGINE_SECTIONS = ("cache", "scheduler", "backend")
_NOT_ENGINE = ("enable_prefix_caching", "max_num_seqs", "max_num_queued_reqs", "engine_restart")
_SIZES = {
    "layers": "layers",
    "hidden": "width of the residual stream",
    "heads": "query heads",
    "kv-heads": "key-value heads",
    "head-dim": "width of a head",
    "ffn": "width of the MLP",
    "vocab": "tokens",
    "context": "longest context, in tokens",
}


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("bench", help="measure kernels and throughput", description=__doc__)
    parser.set_defaults(run=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=Parser)
    _add_kernels(verbs)
    _add_throughput(verbs)
    add_serve(verbs)
    add_costs(verbs)
    add_simulate(verbs)
    add_scenario(verbs)
    add_structured(verbs)
    _add_synthesize(verbs)
    _add_report(verbs)


def _add_kernels(verbs: Any) -> None:
    parser = verbs.add_parser(
        "kernels",
        help="each operation against the ceilings of this machine",
        description="Measures the ceilings of this machine, then every operation of a model against them.",
    )
    parser.add_argument("--model", metavar="MODEL", help="take the sizes of this model (default: SmolLM2-135M's)")
    parser.add_argument(
        "--rows", type=_numbers, metavar="N,N", help="rows of the linears (default 1,8,16,64,256)", default=None
    )
    parser.add_argument(
        "--formats", type=_texts, metavar="F,F", help="of q4_0, q4_1, q8_0, bf16 (default: all of them)"
    )
    parser.add_argument("--isa", metavar="NAME", help="instruction set of the kernels (default: the fastest)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: the CPUs this process may use")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds (default 5)")
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds: to see that it works")
    add_result_flags(parser)
    parser.set_defaults(run=_run_kernels)


def _run_kernels(arguments: argparse.Namespace) -> int:
    try:
        from octavo.bench.local.kernels import Options, run_kernels
    except ImportError as error:
        raise ConfigError(f"kernels need the native backend, which does not load: {error}") from error
    from octavo.bench.report import ceilings_table, kernels_table, steps_table

    given = {name: getattr(arguments, name) for name in ("model", "rows", "isa", "threads", "rounds")}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.formats is not None:
        given["formats"] = tuple(_format(name) for name in arguments.formats)
    options = Options.quick(**given) if arguments.quick else Options(**given)
    warn_if_loaded()
    with bar() as progress:
        result = run_kernels(options, progress)
    print(f"{result['machine']['cpu']}, {result['threads']} threads, {result['isa']}, model: {result['model']}")
    print(f"load average {result['load_before']:.2f} before, {result['load_after']:.2f} after\n")
    print("\n".join(ceilings_table(result)))
    print(
        "\nEvery pass goes through the weights of all layers, so that they come from memory but for what the cache keeps:"
    )
    for form, facts in result["weights"].items():
        weights, cache = facts["bytes"] / 2**20, facts["last_level_cache_bytes"] / 2**20
        print(f"  {form}: {weights:.0f} MiB of weights, last-level cache {cache:.0f} MiB")
    print()
    print("\n".join(kernels_table(result)))
    print("\nWhere the time of a step goes: percent of the step, and in brackets of the part's own roofline:\n")
    print("\n".join(steps_table(result)))
    write_result(result, arguments)
    return 0


def _add_throughput(verbs: Any) -> None:
    parser = verbs.add_parser(
        "throughput",
        help="offline speed on the workloads that engines are compared on",
        description="Runs workloads through the offline LLM, without a server, and prints medians over rounds.",
    )
    parser.add_argument("--model", metavar="MODEL", default="smollm2-135m", help="default: smollm2-135m")
    parser.add_argument(
        "--workload",
        type=_texts,
        metavar="W,W",
        default=("all",),
        help="of single, c16, c64, prompt, prefix; default: all",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the first round's prompts (default 1)")
    batching = parser.add_mutually_exclusive_group()
    batching.add_argument(
        "--one-at-a-time", action="store_const", const=1, dest="batch", help="each request waits for the one before"
    )
    batching.add_argument(
        "--static-batches", type=int, metavar="N", dest="batch", help="the next N start when the last of N has ended"
    )
    add_result_flags(parser)
    add_flags(parser, _ENGINE_SECTIONS, without=_NOT_ENGINE)
    parser.set_defaults(run=_run_throughput)


def _run_throughput(arguments: argparse.Namespace) -> int:
    from octavo.bench.local.throughput import Options, run_throughput
    from octavo.bench.report import throughput_table
    from octavo.bench.workloads import WORKLOADS
    from octavo.config import Config

    sections = [type(getattr(Config(), section)) for section in _ENGINE_SECTIONS]
    fields = [field for section in sections for field in section.__struct_fields__ if field not in _NOT_ENGINE]
    options = Options(
        model=arguments.model,
        workloads=tuple(WORKLOADS) if arguments.workload == ("all",) else arguments.workload,
        rounds=arguments.rounds,
        seed=arguments.seed,
        batch=arguments.batch,
        engine={field: getattr(arguments, field) for field in fields if hasattr(arguments, field)},
    )
    warn_if_loaded()
    with bar() as progress:
        result = run_throughput(options, progress)
    print(f"{result['machine']['cpu']}, {result['machine']['cpus']} CPUs, {result['model']}, {result['batching']}")
    print(f"load average {result['load_before']:.2f} before, {result['load_after']:.2f} after\n")
    print("\n".join(throughput_table(result)))
    write_result(result, arguments)
    return 0


def _add_synthesize(verbs: Any) -> None:
    from octavo.quant import Format

    parser = verbs.add_parser(
        "synthesize",
        help="make up a GGUF model of a given size",
        description="Writes a GGUF file of random weights in the shape of a Llama, with a working tokenizer.",
    )
    parser.add_argument("out", type=Path, metavar="OUT.gguf", help="file to write")
    for name, text in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} (default: that of --like)")
    parser.add_argument(
        "--format", choices=[form.value for form in (Format.Q4_0, Format.Q4_1, Format.Q8_0, Format.BF16, Format.F16)],
        default="q4_0", help="of the matrices (default q4_0); embedding and head are q8_0 beside 4-bit ones",
    )  # fmt: skip
    parser.add_argument("--like", metavar="MODEL", help="GGUF model that gives missing sizes and the tokenizer")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds give equal files (default 0)")
    parser.add_argument("--force", action="store_true", help="overwrite the file if there is one")
    parser.set_defaults(run=_run_synthesize)


def _run_synthesize(arguments: argparse.Namespace) -> int:
    from octavo.bench.local.synthesize import Shape, synthesize

    if arguments.out.suffix != ".gguf":
        raise ConfigError(f"{arguments.out} must end in .gguf", param="out")
    if arguments.out.exists() and not arguments.force:
        raise ConfigError(f"{arguments.out} exists; --force overwrites it", param="out")
    if arguments.seed < 0:
        raise ConfigError("--seed must not be negative", param="seed")
    names = [name.replace("-", "_") for name in _SIZES]
    with byte_bar() as progress:
        parameters = synthesize(
            arguments.out,
            Shape(**{name: getattr(arguments, name) for name in names}),
            form=_format(arguments.format),
            like=arguments.like,
            seed=arguments.seed,
            progress=progress,
        )
    size = arguments.out.stat().st_size
    print(f"{arguments.out}: {parameters / 1e6:,.1f} million parameters, {size / 2**20:,.1f} MiB")
    return 0


def _add_report(verbs: Any) -> None:
    parser = verbs.add_parser(
        "report",
        help="tables and plots of all results",
        description="Makes report.md and plots of the result files. Needs matplotlib: pip install 'octavo[bench]'.",
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), metavar="FOLDER")
    parser.add_argument("--image", choices=["svg", "png"], default="svg", help="kind of the plots (default svg)")
    parser.set_defaults(run=_run_report)


def _run_report(arguments: argparse.Namespace) -> int:
    from octavo.bench.report import write_report

    print(write_report(arguments.results, arguments.out, arguments.image))
    return 0


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _format(name: str) -> Any:
    from octavo.quant import Format

    try:
        return Format(name)
    except ValueError:
        raise ConfigError(f"no format {name!r}: there are {', '.join(Format)}", param="formats") from None


def _texts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> Sequence[int]:
    return tuple(int(part) for part in _texts(text))
