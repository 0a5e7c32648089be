"""`octavo bench costs|simulate|serve|scenario`: what a step costs, and traffic through a simulated engine or a real server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.bench_output import (
    add_result_flags,
    add_server_flags,
    bar,
    count_bar,
    server_key,
    warn_if_loaded,
    write_result,
)
from octavo.cli.flags import add_flags, resolve
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.traffic import Traffic

_DATASETS = ("random", "prefix_repetition", "chats", "trace", "single", "c16", "c64", "prompt", "prefix")
_TEXT_DATASETS = ("sharegpt", "custom")


def add_traffic_flags(parser: argparse.ArgumentParser, *, with_text: bool) -> None:
    """The flags that describe traffic, by vLLM's names. `with_text`: also datasets of literal text."""
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--dataset-name",
        choices=(*_DATASETS, *_TEXT_DATASETS) if with_text else _DATASETS,
        default="random",
        help="what is asked: prompts of random words, of few repeated beginnings, made-up chats of several turns, a file of --dataset-path"
        " (trace"
        + (", sharegpt, custom" if with_text else "")
        + "), or a workload that engines are compared on (default random)",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="the file of the dataset; a trace has one JSON object per line",
    )
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="how many requests (default 1000)")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="equal seeds ask the same (default 1)")
    group.add_argument(
        "--request-rate", type=float, default=float("inf"), metavar="R",
        help="requests per second, at random times; inf sends all at once (default inf)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X",
        help="1 is a Poisson process, less is burstier, more is more even (default 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="most requests at once; others wait at the client"
    )
    for name, default, text in (
        ("random-input-len", 1024, "words of a random prompt, about one token each"),
        ("random-output-len", 128, "tokens that each random prompt is answered with"),
        ("random-prefix-len", 0, "words that all random prompts begin with"),
        ("prefix-repetition-prefix-len", 256, "words of each repeated beginning"),
        ("prefix-repetition-suffix-len", 256, "words that each prompt has to itself"),
        ("prefix-repetition-num-prefixes", 10, "how many different beginnings there are"),
        ("prefix-repetition-output-len", 128, "tokens that each prompt is answered with"),
    ):
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="X",
        help="lengths of random prompts and answers vary by this share up and down (default 0)",
    )  # fmt: skip
    if with_text:
        group.add_argument(
            "--output-len",
            type=int,
            metavar="N",
            help="tokens per answer to sharegpt and custom prompts (default: as the file says)",
        )
    group.add_argument(
        "--save-trace", type=Path, metavar="FILE", help="write what was asked as a trace that can be run again"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests within limits, such as ttft:500 tpot:50",
    )


def traffic_of(arguments: argparse.Namespace) -> Traffic:
    """The traffic that the flags describe. Raises ConfigError."""
    import msgspec

    from octavo.bench import traffic

    name, seed, count = arguments.dataset_name, arguments.seed, arguments.num_prompts
    if count < 1:
        raise ConfigError("--num-prompts must be at least 1", param="num_prompts")
    if (name in ("trace", *_TEXT_DATASETS)) != (arguments.dataset_path is not None):
        raise ConfigError("--dataset-path goes with the datasets trace, sharegpt and custom", param="dataset_path")
    match name:
        case "random":
            made = traffic.random_lengths(
                count, input_len=arguments.random_input_len, output_len=arguments.random_output_len,
                range_ratio=arguments.random_range_ratio, prefix_len=arguments.random_prefix_len, seed=seed,
            )  # fmt: skip
        case "prefix_repetition":
            made = traffic.repeated_prefixes(
                count,
                prefix_len=arguments.prefix_repetition_prefix_len,
                suffix_len=arguments.prefix_repetition_suffix_len,
                num_prefixes=arguments.prefix_repetition_num_prefixes,
                output_len=arguments.prefix_repetition_output_len,
                seed=seed,
            )
        case "chats":
            made = traffic.chats(count, seed=seed)
        case "trace":
            made = traffic.read_trace(arguments.dataset_path, seed)
        case "sharegpt":
            made = traffic.read_sharegpt(arguments.dataset_path, count, arguments.output_len, seed)
        case "custom":
            made = traffic.read_custom(arguments.dataset_path, count, arguments.output_len or 128)
        case _:
            made = traffic.race(name, seed)
    if arguments.request_rate != float("inf"):
        made = traffic.arriving(made, arguments.request_rate, arguments.burstiness)
    if arguments.max_concurrency is not None:
        made = msgspec.structs.replace(made, max_concurrency=arguments.max_concurrency)
    made.check()
    if arguments.save_trace is not None:
        traffic.write_trace(made, arguments.save_trace)
    return made


def add_costs(verbs: Any) -> None:
    """Adds `octavo bench costs`."""
    parser = verbs.add_parser(
        "costs",
        help="measure what a step costs, for the simulator",
        description="Loads a model, measures steps of many shapes and what a server adds to them, and fits the simulator's cost model.",
    )
    parser.add_argument(
        "--backend-only", action="store_true", help="leave out what server and client add: simulate the offline engine"
    )
    add_result_flags(parser)
    add_flags(parser, ("model", "cache", "scheduler", "backend"))
    parser.set_defaults(run=_run_costs)


def _run_costs(arguments: argparse.Namespace) -> int:
    import msgspec

    from octavo.bench.calibrate import add_serving
    from octavo.bench.load_report import costs_table
    from octavo.bench.local.costs import measure, result_of
    from octavo.bench.results import load_average

    config = resolve(arguments)
    warn_if_loaded()
    with bar() as progress:
        costs, points = measure(config, progress)
        result = result_of(costs, points, {"model": costs.model.name, "backend_only": arguments.backend_only})
        if not arguments.backend_only:
            costs, serving = add_serving(costs, config, progress)
            result |= {"costs": msgspec.to_builtins(costs), "serving": serving}
    result["load_after"] = load_average()
    print("\n".join(costs_table(result)))
    write_result(result, arguments)
    return 0


def add_simulate(verbs: Any) -> None:
    """Adds `octavo bench simulate`."""
    parser = verbs.add_parser(
        "simulate",
        help="traffic through the real scheduler and cache, without computing",
        description="Runs traffic through the real scheduler and KV cache on a virtual clock; steps take what octavo bench costs measured.",
    )
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="result of octavo bench costs (default: the newest for --model)"
    )
    parser.add_argument(
        "--model", default="smollm2-135m", metavar="MODEL", help="whose costs to take (default smollm2-135m)"
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="longest prompt plus output, in tokens",
    )
    parser.add_argument("--offline", action="store_true", help="without what server and client add to a step")
    add_traffic_flags(parser, with_text=False)
    add_result_flags(parser)
    add_flags(parser, ("cache", "scheduler"), without=("kv_cache_dtype",))
    parser.set_defaults(run=_run_simulate)


def _run_simulate(arguments: argparse.Namespace) -> int:
    import msgspec

    from octavo.bench import results
    from octavo.bench.figures import parse_goodput
    from octavo.bench.load_report import load_report
    from octavo.bench.local.costs import ServingCosts, read_costs
    from octavo.bench.local.simulate import simulate

    traffic, goodput, config = traffic_of(arguments), parse_goodput(arguments.goodput), resolve(arguments)
    path, costs = read_costs(arguments.costs, arguments.model)
    if arguments.offline:
        costs = msgspec.structs.replace(costs, serving=ServingCosts())
    with count_bar() as progress:
        simulation = simulate(traffic, costs, config, progress)
    options = {"traffic": given(arguments), "costs": path.name, "cache": config.cache, "scheduler": config.scheduler}
    result = results.header("simulate", msgspec.to_builtins(options)) | {
        "model": costs.model.name,
        "workload": traffic.name,
    }
    result |= simulation.figures(goodput) | {"load_after": results.load_average()}
    print("\n".join(load_report(result, " Simulated Serving Result ")))
    write_result(result, arguments)
    return 0


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The traffic's flags with their values, for the result file."""
    names: Sequence[str] = (
        "dataset_name", "dataset_path", "num_prompts", "seed", "request_rate", "burstiness", "max_concurrency", "random_input_len",
        "random_output_len", "random_prefix_len", "random_range_ratio", "prefix_repetition_prefix_len",
        "prefix_repetition_suffix_len", "prefix_repetition_num_prefixes", "prefix_repetition_output_len", "goodput",
    )  # fmt: skip
    values = {name: getattr(arguments, name) for name in names}
    others = {"random", "prefix_repetition"} - {arguments.dataset_name}
    relevant = [name for name in names if not any(name.startswith(f"{other}_") for other in others)]
    return {
        name: str(value) if isinstance(value, Path) or value == float("inf") else value
        for name, value in values.items()
        if name in relevant and value not in (None, [])
    }


def add_serve(verbs: Any) -> None:
    """Adds `octavo bench serve`."""
    parser = verbs.add_parser(
        "serve",
        help="load a running server, of any engine, over HTTP",
        description="Sends traffic to an OpenAI-compatible server that runs already, and reports latencies as vLLM's benchmark does.",
    )
    add_server_flags(parser)
    parser.add_argument(
        "--backend",
        dest="api",
        choices=("openai", "openai-chat"),
        default="openai",
        help="ask for completions or for chat completions (default openai)",
    )
    parser.add_argument(
        "--tenant-key",
        nargs="+",
        default=[],
        metavar="TENANT:KEY",
        help="key to send for the jobs of a tenant of a trace",
    )
    parser.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="generate exactly as many tokens as asked for; --no-ignore-eos for servers without that field (default on)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="sampling temperature (default 0: greedy)"
    )
    parser.add_argument("--extra-body", metavar="JSON", help="object whose fields go into every request")
    parser.add_argument(
        "--num-warmups", type=int, default=2, metavar="N", help="short requests before the clock starts (default 2)"
    )
    parser.add_argument("--label", metavar="TEXT", help="name of this run in the result")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the distributions of latencies and the rate over time (.svg or .png)",
    )
    add_traffic_flags(parser, with_text=True)
    add_result_flags(parser)
    parser.set_defaults(run=_run_serve)


def _run_serve(arguments: argparse.Namespace) -> int:
    import asyncio

    import msgspec

    from octavo.bench.figures import parse_goodput
    from octavo.bench.http.client import Target, first_model
    from octavo.bench.http.load import run_load
    from octavo.bench.load_report import load_report

    key = server_key(arguments)
    keys = {"": key} if key else {}
    for pair in arguments.tenant_key:
        tenant, colon, key = pair.partition(":")
        if not (tenant and colon and key):
            raise ConfigError("--tenant-key takes TENANT:KEY", param="tenant_key")
        keys[tenant] = key
    try:
        extra = msgspec.json.decode(arguments.extra_body or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--extra-body is no JSON object: {error}", param="extra_body") from None
    if arguments.num_warmups < 0:
        raise ConfigError("--num-warmups must not be negative", param="num_warmups")
    check_plot(arguments.plot)
    traffic, goodput = traffic_of(arguments), parse_goodput(arguments.goodput)
    model = arguments.model_name or asyncio.run(first_model(arguments.base_url, keys.get("")))
    target = Target(
        base_url=arguments.base_url, model=model, backend=arguments.api, keys=keys, ignore_eos=arguments.ignore_eos,
        temperature=arguments.temperature, extra_body=extra,
    )  # fmt: skip
    options = {"traffic": given(arguments), "backend": arguments.api, "extra_body": extra}
    with count_bar() as progress:
        result, outcomes = asyncio.run(
            run_load(traffic, target, options, goodput=goodput, num_warmups=arguments.num_warmups, progress=progress)
        )
    if arguments.label:
        result["label"] = arguments.label
    print("\n".join(load_report(result, " Serving Benchmark Result ")))
    if arguments.plot is not None:
        from octavo.bench.plots import plot_load

        plot_load(result, outcomes, arguments.plot)
    write_result(result, arguments)
    return 0 if result["completed"] else 1


def add_scenario(verbs: Any) -> None:
    """Adds `octavo bench scenario`."""
    from octavo.bench.scenarios import SCENARIOS

    parser = verbs.add_parser(
        "scenario",
        help="situations that servers are judged by, with what shall hold in them",
        description="Starts servers, sends a scenario's traffic to each and checks its claims; exits with 1 when one does not hold. "
        + " ".join(f"{name}: {scenario.description}." for name, scenario in SCENARIOS.items()),
    )
    parser.add_argument("name", choices=tuple(SCENARIOS), metavar="NAME", help=f"one of {', '.join(SCENARIOS)}")
    parser.add_argument(
        "--model", dest="model_name", metavar="MODEL", help="serve this model instead of the scenario's own"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="measure N times, taking turns, and take medians (default 1)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the first round's prompts (default 1)")
    parser.add_argument("--simulate", action="store_true", help="ask the simulator instead of servers")
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="result of octavo bench costs to simulate with (default: the newest)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distributions of latencies (.svg or .png)")
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="RESULT",
        help="compare with an earlier result, such as a simulated one, also in the plot",
    )
    add_result_flags(parser)
    parser.set_defaults(run=_run_scenario)


def _run_scenario(arguments: argparse.Namespace) -> int:
    from octavo.bench.load_report import comparison, scenario_report
    from octavo.bench.local.costs import read_costs
    from octavo.bench.report import read_result
    from octavo.bench.scenario_runs import run_scenario
    from octavo.bench.scenarios import SCENARIOS

    scenario = SCENARIOS[arguments.name]
    check_plot(arguments.plot)
    beside = [] if arguments.beside is None else [read_result(arguments.beside)]
    if any(result.get("scenario") != scenario.name for result in beside):
        raise ConfigError(f"{arguments.beside} is no result of the scenario {scenario.name}", param="beside")
    costs = None
    if arguments.simulate:
        costs = read_costs(arguments.costs, arguments.model_name or scenario.model)
    else:
        warn_if_loaded()
    with bar() as progress:
        result = run_scenario(
            scenario,
            model=arguments.model_name,
            rounds=arguments.rounds,
            seed=arguments.seed,
            costs=costs,
            progress=progress,
        )
    print(f"{scenario.description}; {result['model']}, by {result['by']}\n")
    print("\n".join(scenario_report(result)))
    for other in beside:
        print("\n".join(["", *comparison(result, other)]))
    if arguments.plot is not None:
        from octavo.bench.plots import plot_scenario

        plot_scenario([result, *beside], arguments.plot)
    write_result(result, arguments)
    return 1 if any(claim["holds"] is False for claim in result["claims"]) else 0


def check_plot(path: Path | None) -> None:
    """Refuses a file that nothing can be drawn into, before anything is measured. Raises ConfigError."""
    if path is not None and path.suffix not in (".svg", ".png"):
        raise ConfigError("--plot must end in .svg or .png", param="plot")
