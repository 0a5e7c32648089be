"""Single operations of a model on this machine against what the machine gives at most.

Measures the ceilings first: memory, cache, integer and float peaks, barriers. Then a model of random weights, recorded and run as the
engine does, phase by phase (a phase is what runs between two barriers), in interleaved rounds, so that a neighbour's noise meets all
alike. Every pass goes through all layers, so that weights, K and V come from memory as they do in serving; what stays in the last-level
cache from pass to pass stays there in serving too, and can lift an operation over 100 %.

The roofline of an operation is max(bytes it must move / memory bandwidth, operations / peak of its arithmetic); its percentage is
roofline time / measured time. Ceilings are those of the machine, whatever instruction set the kernels are told to use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from octavo.backends.cpu import _native
from octavo.backends.cpu.build import available_isas, chosen_isa
from octavo.backends.cpu.recorder import CpuWeight, record
from octavo.backends.cpu.sampler import CpuSampler
from octavo.bench import results
from octavo.bench.local.random_weights import embedding_format, random_matrix
from octavo.contracts import TokenSampling
from octavo.errors import ConfigError
from octavo.loaders.checkpoint import open_checkpoint
from octavo.models import ModelSpec, make_forward
from octavo.obs.machine import cpu_count, free_memory_bytes
from octavo.ops import Rope, RopeStyle
from octavo.quant import Format
from octavo.runner.load import read_spec

Arithmetic = Literal["int8", "bf16", "f32"]

BLOCK_SIZE = 16
MOST_HEAD_ROWS = 64
"""The head computes only rows that are sampled: more never meet in a step."""
_DEFAULT_LAST_CACHE_BYTES = 32 << 20
_ARITHMETIC: dict[Format, Arithmetic] = {
    Format.Q4_0: "int8",
    Format.Q4_1: "int8",
    Format.Q8_0: "int8",
    Format.F16: "bf16",
    Format.BF16: "bf16",
}
FORMATS = tuple(_ARITHMETIC)
"""Those that kernels can be measured in."""

Progress = Callable[[str, int, int], None]
"""Called with (what comes next, steps done, steps in all)."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `model`: None for the shapes of SmolLM2-135M, else anything that names a model; only its sizes are read.

    decode: (sequences, context) pairs; prefill: (tokens of a chunk, context at its end) pairs. min_seconds: least time of one
    operation in one round. buffer_bytes: memory read for the bandwidth.
    """

    model: str | None = None
    rows: tuple[int, ...] = (1, 8, 16, 64, 256)
    formats: tuple[Format, ...] = (Format.Q4_0, Format.Q4_1, Format.Q8_0, Format.BF16)
    decode: tuple[tuple[int, int], ...] = ((1, 256), (1, 1024), (1, 4096), (16, 256), (16, 1024), (64, 256))
    prefill: tuple[tuple[int, int], ...] = ((128, 128), (256, 256), (256, 1024), (512, 512))
    isa: str | None = None
    threads: int | None = None
    rounds: int = 5
    min_seconds: float = 0.03
    buffer_bytes: int = 256 << 20

    @classmethod
    def quick(cls, **changes: Any) -> Options:
        """Small sizes and few rounds: shows that everything works, measures nothing well."""
        small: dict[str, Any] = {
            "rows": (1, 8),
            "formats": (Format.Q4_1,),
            "decode": ((1, 64),),
            "prefill": ((64, 64),),
            "rounds": 2,
            "min_seconds": 0.0005,
            "buffer_bytes": 8 << 20,
        }
        return cls(**(small | changes))


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation must do at least, with bytes of memory, or of cache when `cached`."""

    num_bytes: float
    operations: float = 0.0
    arithmetic: Arithmetic = "f32"
    cached: bool = False


class Share(msgspec.Struct, kw_only=True):
    """Phases of a step that are alike: how many, their costs, and the seconds of all of them together in each round."""

    count: int
    parts: tuple[Cost, ...]
    seconds: list[float] = []


class Operation(msgspec.Struct, kw_only=True):
    """One line of the result, and the seconds that its rounds took. `parts`: costs that follow one another; none where no
    bound is known. `shares`: what a step consists of, by kind of phase.
    """

    op: str
    shape: str
    format: str
    rows: int
    context: int | None = None
    parts: tuple[Cost, ...]
    single_thread: bool = False
    shares: dict[str, Share] = {}
    seconds: list[float] = []


class Group(msgspec.Struct, frozen=True):
    """Operations that are measured together. `run` returns the seconds of each."""

    operations: tuple[Operation, ...]
    run: Callable[[], Sequence[float]]


def smollm2_spec() -> ModelSpec:
    """Sizes of SmolLM2-135M, the default model."""
    return ModelSpec(
        family="llama",
        num_layers=30,
        hidden=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab_size=49152,
        max_context=8192,
        norm_eps=1e-5,
        rope=plain_rope(64, 100000.0),
        tied_head=True,
    )


def plain_rope(head_dim: int, base: float) -> Rope:
    """Unscaled rotary embedding."""
    frequencies = tuple(base ** (-2.0 * pair / head_dim) for pair in range(head_dim // 2))
    return Rope(head_dim=head_dim, style=RopeStyle.INTERLEAVED, inverse_frequencies=frequencies)


def run_kernels(options: Options, progress: Progress | None = None) -> dict[str, Any]:
    """Measures everything and returns the result as JSON-ready values.

    Raises ConfigError for options that do not fit the machine or its memory, and what opening the model raises.
    """
    isa = options.isa if options.isa is not None else chosen_isa()
    if isa not in available_isas():
        raise ConfigError(f"--isa is {isa!r}, but this machine runs {', '.join(available_isas())}", param="isa")
    threads = options.threads or cpu_count()
    spec = smollm2_spec() if options.model is None else read_spec(open_checkpoint(options.model))
    _check(options, spec)
    report = progress or (lambda *_: None)
    result = results.header("kernels", msgspec.to_builtins(options))
    result |= {"model": options.model or "shapes of SmolLM2-135M", "isa": isa, "threads": threads}

    report("preparing memory", 0, 1)
    pool, single = _native.Pool(threads), _native.Pool(1)
    ceilings = _Ceilings(pool, single, options)
    cache = _make_cache(spec, isa, pool, options)
    groups: list[Group] = []
    for form in options.formats:
        first = form is options.formats[0]  # K and V have a format of their own: one model is enough for attention
        bench = _FormatBench(spec, form, isa, pool, cache, options, all_attention=first)
        groups += bench.groups()
        result.setdefault("weights", {})[form.value] = bench.facts()
    groups += _row_groups(spec, isa, options)
    groups += _sampler_groups(spec, isa, pool, options)

    total = options.rounds * (len(groups) + 1)
    for number in range(options.rounds):
        done = number * (len(groups) + 1)
        report("ceilings", done, total)
        ceilings.measure()
        for index, group in enumerate(groups, start=1):
            shown = group.operations[0]
            report(f"{shown.op}, {shown.format}, {shown.rows} rows", done + index, total)
            for operation, seconds in zip(group.operations, group.run(), strict=True):
                operation.seconds.append(seconds)
    report("done", total, total)
    result["ceilings"] = ceilings.facts()
    result["results"] = [
        _line(operation, ceilings) for group in groups for operation in group.operations if operation.seconds
    ]
    result["load_after"] = results.load_average()
    return result


def _check(options: Options, spec: ModelSpec) -> None:
    """Refuses what cannot be measured, before memory is taken."""
    for form in options.formats:
        if form not in _ARITHMETIC:
            known = ", ".join(form.value for form in FORMATS)
            raise ConfigError(f"kernels are not measured in {form.value}; formats are {known}", param="formats")
        for width in (spec.hidden, spec.ffn, spec.num_heads * spec.head_dim):
            if width % form.block:
                raise ConfigError(f"rows of {width} weights cannot be stored in {form.value}", param="formats")
    if not options.rows or min(options.rows) < 1 or max(options.rows) > 65536:
        raise ConfigError("--rows must be in 1..65536", param="rows")
    if options.rounds < 1:
        raise ConfigError("--rounds must be at least 1", param="rounds")
    needed = 2 * options.buffer_bytes + sum(_weight_bytes(spec, form) for form in options.formats)
    needed += _cache_blocks(options) * BLOCK_SIZE * _kv_token_bytes(spec)
    if needed > 0.8 * free_memory_bytes():
        raise ConfigError(
            f"this model in {len(options.formats)} formats needs {needed / 2**30:.1f} GiB, more than is free; "
            "name fewer with --formats",
            param="formats",
        )


def _weight_bytes(spec: ModelSpec, form: Format) -> int:
    total = 0
    for name, shape in spec.weight_shapes().items():
        used = embedding_format(form) if name in ("embed", "head") else form
        total += used.num_bytes(shape[0] * shape[1]) if len(shape) == 2 else 4 * shape[0]
    return total


def _line(operation: Operation, ceilings: _Ceilings) -> dict[str, Any]:
    best, median = min(operation.seconds), statistics.median(operation.seconds)
    line: dict[str, Any] = {
        "op": operation.op,
        "shape": operation.shape,
        "format": operation.format,
        "rows": operation.rows,
        "context": operation.context,
        "best_s": best,
        "median_s": median,
    }
    if operation.shares:
        line["phases"] = {
            kind: {
                "count": share.count,
                "median_s": statistics.median(share.seconds),
                "roofline_s": _roofline_s(share.parts, ceilings),
            }
            for kind, share in operation.shares.items()
        }
    if not operation.parts:
        return line
    num_bytes = sum(part.num_bytes for part in operation.parts)
    operations = sum(part.operations for part in operation.parts)
    bounds = [ceilings.bound(part, operation.single_thread) for part in operation.parts]
    roofline_s = _roofline_s(operation.parts, ceilings, operation.single_thread)
    bound = "cache" if operation.parts[0].cached else "memory"
    if sum(memory for memory, _ in bounds) < sum(compute for _, compute in bounds):
        bound = "compute"
    return line | {
        "bytes": num_bytes,
        "operations": operations,
        "gb_s": num_bytes / median / 1e9,
        "gop_s": operations / median / 1e9,
        "bound": bound,
        "roofline_s": roofline_s,
        "roofline_percent": 100 * roofline_s / median,
        "best_roofline_percent": 100 * roofline_s / best,
    }


def _roofline_s(parts: Sequence[Cost], ceilings: _Ceilings, single_thread: bool = False) -> float:
    return sum(max(ceilings.bound(part, single_thread)) for part in parts)


class _Ceilings:
    """What the machine gave in each round. A ceiling is the best of them."""

    def __init__(self, pool: _native.Pool, single: _native.Pool, options: Options) -> None:
        self._pools = {"one_thread": single, "all_threads": pool}
        self._rounds: dict[str, list[float]] = {}
        # At most a quarter of a cache, so that two threads on one core do not push each other out of it.
        self._l2_tile = min((results.cache_bytes(2) or 1 << 20) // 2, 1 << 20)
        self._tile = min(1 << 20, options.buffer_bytes)
        size = options.buffer_bytes // self._tile * self._tile
        self._memory = {"4k": _native.ReadBuffer(size, False), "huge": _native.ReadBuffer(size, True)}
        self._l2 = {
            name: _native.ReadBuffer(threads.threads * self._l2_tile, True) for name, threads in self._pools.items()
        }
        self._loops = max(2000, int(options.min_seconds * 5e6))

    def measure(self) -> None:
        """One round."""
        for name, pool in self._pools.items():
            for pages, buffer in self._memory.items():
                seconds = min(buffer.time_read(pool, self._tile, 1, streams) for streams in (1, 2, 4))
                self._note(f"memory_{pages}_pages_{name}_gb_s", buffer.bytes / seconds / 1e9)
            repeats = max(4, self._loops // 1000)
            l2 = self._l2[name]
            seconds = min(l2.time_read(pool, self._l2_tile, repeats, streams) for streams in (1, 2))
            self._note(f"l2_{name}_gb_s", l2.bytes * repeats / seconds / 1e9)
            for kind in ("int8", "bf16", "f32"):
                peak = max(_native.bench_peak(pool, kind, self._loops) for _ in range(3))
                self._note(f"{kind}_{name}_gop_s", peak / 1e9)
        pool = self._pools["all_threads"]
        self._note("barrier_ns", _native.bench_dispatch(pool, self._loops // 10) * 1e9)
        self._note("wake_up_us", _native.bench_wake(pool, 1e-3) * 1e6)

    def facts(self) -> dict[str, dict[str, float]]:
        """Best and median of each."""
        return {
            name: {
                "best": min(values) if name.endswith(("_ns", "_us")) else max(values),
                "median": statistics.median(values),
            }
            for name, values in self._rounds.items()
        }

    def bound(self, cost: Cost, single_thread: bool) -> tuple[float, float]:
        """Seconds that a cost takes at least: for its bytes, for its operations."""
        name = "one_thread" if single_thread else "all_threads"
        if cost.cached:
            bandwidth = self._best(f"l2_{name}_gb_s")
        else:  # One thread may read as fast as all.
            bandwidth = max(
                self._best(f"memory_{pages}_pages_{who}_gb_s")
                for pages in self._memory
                for who in ({name} if single_thread else self._pools)
            )
        # A machine without the instructions for a kind computes it in float32.
        peak = self._peak(cost.arithmetic, name) or self._peak("f32", name)
        return cost.num_bytes / bandwidth / 1e9, cost.operations / peak / 1e9

    def _peak(self, kind: Arithmetic, threads: str) -> float:
        return max(self._best(f"{kind}_{threads}_gop_s"), self._best(f"{kind}_one_thread_gop_s"))

    def _best(self, name: str) -> float:
        return max(self._rounds[name])

    def _note(self, name: str, value: float) -> None:
        self._rounds.setdefault(name, []).append(value)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A step of `count` sequences with `tokens` new tokens each that end at `context`, of which `logits` give a row of logits.

    kind: `rows` for the linears at that number of rows, `decode` and `prompt` for whole steps, `attention` for no more than that.
    """

    kind: Literal["rows", "decode", "prompt", "attention"]
    count: int
    tokens: int
    context: int
    logits: int

    @property
    def rows(self) -> int:
        """Tokens computed."""
        return self.count * self.tokens


def _cases(options: Options, *, all_attention: bool) -> list[Case]:
    """What is measured in a format. Decode steps are those of the first context of each number of sequences, prompts whole ones."""
    cases = [
        Case(kind="rows", count=rows, tokens=1, context=BLOCK_SIZE, logits=rows if rows <= MOST_HEAD_ROWS else 1)
        for rows in options.rows
    ]
    seen: set[int] = set()
    for count, context in options.decode:
        if count not in seen or all_attention:
            kind: Literal["decode", "attention"] = "attention" if count in seen else "decode"
            cases.append(Case(kind=kind, count=count, tokens=1, context=context, logits=count))
        seen.add(count)
    for tokens, context in options.prefill:
        if tokens == context:
            cases.append(Case(kind="prompt", count=1, tokens=tokens, context=context, logits=1))
        elif all_attention:
            cases.append(Case(kind="attention", count=1, tokens=tokens, context=context, logits=1))
    return cases


class _Phases(msgspec.Struct, frozen=True):
    """The phases of a program that are alike: their places, and the linears in each."""

    places: tuple[int, ...]
    names: tuple[str, ...]


class _FormatBench:
    """A model of random weights in one format, recorded as the engine does: steps of any size, timed phase by phase."""

    def __init__(
        self,
        spec: ModelSpec,
        form: Format,
        isa: str,
        pool: _native.Pool,
        cache: _native.KvStore,
        options: Options,
        *,
        all_attention: bool,
    ) -> None:
        self._spec, self._form, self._pool, self._options = spec, form, pool, options
        self._all_attention = all_attention
        self._native = _native.Weights()
        self._handles: dict[str, CpuWeight] = {}
        for name, shape in spec.weight_shapes().items():
            if len(shape) == 2:
                index = self._native.declare_matrix(self._format_of(name).value, False, *shape)
            else:
                index = self._native.declare_vector(*shape)
            self._handles[name] = CpuWeight(shape, index)
        self._program = record(make_forward(spec), self._handles, self._native, isa)
        self._native.allocate()
        raw: dict[tuple[int, ...], Any] = {}
        for name, handle in self._handles.items():
            if len(handle.shape) == 1:
                values = np.full(handle.shape, 0.0 if name.endswith("_bias") else 1.0, np.float32)
                self._native.fill_vector(handle.index, values)
                continue
            n, k = handle.shape
            if (n, k) not in raw:  # layers share bytes, not memory
                raw[n, k] = random_matrix(self._format_of(name), n, k, seed=(n, k))
            self._native.fill_matrix(pool, handle.index, raw[n, k])
        self._program.bind(cache)
        self._phases = self._kinds_of_phases()

    def facts(self) -> dict[str, int]:
        """Bytes of the weights, and of the cache that some of them may stay in from one pass to the next."""
        return {"bytes": self._native.bytes, "last_level_cache_bytes": _last_cache_bytes()}

    def groups(self) -> list[Group]:
        """All cases."""
        return [self._group(case) for case in _cases(self._options, all_attention=self._all_attention)]

    def _format_of(self, name: str) -> Format:
        return embedding_format(self._form) if name in ("embed", "head") else self._form

    def _kinds_of_phases(self) -> dict[str, _Phases]:
        """Phases of the program by what is in them: linears by name, attention, rows for all that couples no rows with weights."""
        names = {handle.index: name for name, handle in self._handles.items() if len(handle.shape) == 2}
        places: dict[str, list[int]] = {}
        linears: dict[str, tuple[str, ...]] = {}
        for place, (ops, matrices) in enumerate(_native.bench_phase_facts(self._program)):
            if matrices:
                used = tuple(names[index] for index in matrices)
                parts = ["head" if name == "embed" else name.rsplit(".", 1)[-1] for name in used]
                kind = f"linear {'+'.join(parts)}"
                linears.setdefault(kind, used)
            else:
                kind = "attention" if "attention" in ops else "rows"
            places.setdefault(kind, []).append(place)
        return {kind: _Phases(tuple(found), linears.get(kind, ())) for kind, found in places.items()}

    def _group(self, case: Case) -> Group:
        """Times a step's phases; an operation is the mean of the phases that are alike, or all row phases together."""
        batch = _batch(case, self._spec.vocab_size)
        operations = self._operations(case)

        def run() -> list[float]:
            passes: list[list[float]] = []
            started = time.perf_counter()
            while not passes or time.perf_counter() - started < self._options.min_seconds:
                passes.append(_native.bench_phases(self._program, self._pool, *batch))
            for operation in operations.values():
                for kind, share in operation.shares.items():
                    share.seconds.append(self._median_of(kind, passes))
            return [
                self._median_of(kind, passes) / (1 if kind in ("step", "rows") else len(self._phases[kind].places))
                for kind in operations
            ]

        self._program.run(self._pool, *batch[:3], [batch[3]], batch[4])  # makes its scratch memory
        return Group(tuple(operations.values()), run)

    def _median_of(self, kind: str, passes: Sequence[Sequence[float]]) -> float:
        """Seconds of all phases of a kind, or of the whole step: the median of the passes."""
        if kind == "step":
            return statistics.median(map(sum, passes))
        places = self._phases[kind].places
        return statistics.median(sum(seconds[place] for place in places) for seconds in passes)

    def _operations(self, case: Case) -> dict[str, Operation]:
        """What a case says something about, by kind of phase, or `step` for all phases."""
        if case.kind == "rows":
            kinds = [kind for kind in self._phases if kind != "attention"]
            if case.logits < case.rows:
                kinds.remove("linear head")
            return {kind: self._phase_operation(kind, case) for kind in kinds}
        operations = {}
        if case.kind != "attention":
            operations["step"] = self._step_operation(case)
        if self._all_attention and "attention" in self._phases:
            operations["attention"] = self._phase_operation("attention", case)
        return operations

    def _phase_operation(self, kind: str, case: Case) -> Operation:
        spec, names = self._spec, self._phases[kind].names
        if kind == "attention":
            return Operation(
                op=f"attention {'decode' if case.tokens == 1 else 'prefill'}",
                shape=f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}",
                format="bf16",
                rows=case.rows,
                context=case.context,
                parts=(_attention_cost(spec, case),),
            )
        if kind == "rows":
            shape = f"{len(self._phases[kind].places)} phases"
            return Operation(op="row phases", shape=shape, format=self._form.value, rows=case.rows, parts=())
        n, k = sum(self._handles[name].shape[0] for name in names), self._handles[names[0]].shape[1]
        return Operation(
            op=kind,
            shape=f"{n} x {k}",
            format=self._format_of(names[0]).value,
            rows=case.rows,
            parts=(self._linear_cost(kind, case),),
        )

    def _step_operation(self, case: Case) -> Operation:
        shares = {}
        for kind, phases in self._phases.items():
            count = len(phases.places)
            cost: tuple[Cost, ...] = ()
            if kind == "attention":
                cost = (_attention_cost(self._spec, case),)
            elif kind != "rows":
                cost = (self._linear_cost(kind, case),)
            shares[kind] = Share(count=count, parts=cost * count)
        return Operation(
            op=f"step {case.kind}",
            shape=f"{self._spec.num_layers} layers",
            format=self._form.value,
            rows=case.rows,
            context=case.context,
            parts=tuple(part for share in shares.values() for part in share.parts),
            shares=shares,
        )

    def _linear_cost(self, kind: str, case: Case) -> Cost:
        """Stored weights once; inputs and outputs stay in cache."""
        rows = case.logits if kind == "linear head" else case.rows
        matrices = [(self._format_of(name), self._handles[name].shape) for name in self._phases[kind].names]
        return Cost(
            num_bytes=sum(form.num_bytes(n * k) for form, (n, k) in matrices),
            operations=sum(2.0 * n * k * rows for _, (n, k) in matrices),
            arithmetic=_ARITHMETIC[matrices[0][0]],
        )


def _batch(case: Case, vocab: int) -> tuple[Any, Any, Any, Any, Any]:
    """tokens, positions, row_starts, table, logit_rows of a case. Blocks are scattered over the cache."""
    random, columns = np.random.default_rng(0), _blocks(case.context)
    starts = np.arange(0, case.rows + 1, case.tokens, dtype=np.int32)
    return (
        random.integers(0, vocab, case.rows).astype(np.int32),
        np.tile(np.arange(case.context - case.tokens, case.context, dtype=np.int32), case.count),
        starts,
        random.permutation(case.count * columns).astype(np.int32).reshape(case.count, columns),
        (starts[1:] - 1)[-case.logits :].astype(np.int32),
    )


def _attention_cost(spec: ModelSpec, case: Case) -> Cost:
    """K and V once; two products per head and pair of tokens that see each other."""
    pairs = case.count * (case.tokens * case.context - case.tokens * (case.tokens - 1) // 2)
    return Cost(
        num_bytes=case.count * case.context * _kv_token_bytes(spec) / spec.num_layers,
        operations=4.0 * pairs * spec.num_heads * spec.head_dim,
        arithmetic="f32",
    )


def _cache_blocks(options: Options) -> int:
    return max(case.count * _blocks(case.context) for case in _cases(options, all_attention=True))


def _make_cache(spec: ModelSpec, isa: str, pool: _native.Pool, options: Options) -> _native.KvStore:
    """One KV cache for all cases, every page of it written."""
    layers = list(range(spec.num_layers))
    cache = _native.KvStore(
        "bfloat16", BLOCK_SIZE, [(layers, _cache_blocks(options), spec.num_kv_heads, spec.head_dim, 0)]
    )
    _native.bench_fill_cache(pool, isa, cache)
    return cache


def _row_groups(spec: ModelSpec, isa: str, options: Options) -> list[Group]:
    """Operations on single rows, on one thread, as they run between linears. Their data lie in the first-level cache, which can be
    faster than the second-level one they are compared with.
    """
    q_width = spec.num_heads * spec.head_dim
    cases = [
        ("rms_norm", spec.hidden, 12.0),
        ("add", spec.hidden, 12.0),
        ("quantize", spec.hidden, 4 + 44 / 32),
        ("quantize", spec.ffn, 4 + 44 / 32),
        ("to_bf16", spec.hidden, 6.0),
        ("silu_mul", spec.ffn, 12.0),
        ("rope", q_width, 8.0),
    ]

    def group(name: str, columns: int, bytes_per_element: float) -> Group:
        repeats = max(50, int(options.min_seconds / 1e-6))
        operation = Operation(
            op=name,
            shape=str(columns),
            format="f32",
            rows=1,
            parts=(Cost(num_bytes=columns * bytes_per_element, cached=True),),
            single_thread=True,
        )
        return Group((operation,), lambda: [_native.bench_row_op(isa, name, columns, spec.head_dim, repeats)])

    return [group(*case) for case in cases]


def _sampler_groups(spec: ModelSpec, isa: str, pool: _native.Pool, options: Options) -> list[Group]:
    """Greedy and random sampling of all rows of a step."""
    kinds = {
        "greedy": TokenSampling(max_tokens=1, temperature=0.0),
        "top-p": TokenSampling(max_tokens=1, temperature=0.8, top_p=0.9),
    }
    groups = []
    for kind, sampling in kinds.items():
        for rows in sorted({min(rows, MOST_HEAD_ROWS) for rows in options.rows}):
            sampler = CpuSampler(rows, spec.vocab_size, isa=isa, pool=pool)
            for slot in range(rows):
                sampler.start(slot, sampling, np.zeros(1, np.int32), 1)
            logits = np.random.default_rng(2).normal(0, 3, (rows, spec.vocab_size)).astype(np.float32)

            def run(sampler: CpuSampler = sampler, logits: Any = logits, rows: int = rows) -> list[float]:
                seconds: list[float] = []
                positions = [1] * rows
                started = time.perf_counter()
                while not seconds or time.perf_counter() - started < options.min_seconds:
                    scratch = logits.copy()  # sampling overwrites them
                    begin = time.perf_counter()
                    sampler.sample(scratch, range(rows), positions)
                    seconds.append(time.perf_counter() - begin)
                return [statistics.median(seconds)]

            num_bytes = 4.0 * rows * spec.vocab_size
            operation = Operation(
                op=f"sample {kind}",
                shape=str(spec.vocab_size),
                format="f32",
                rows=rows,
                parts=(Cost(num_bytes=num_bytes, cached=num_bytes < (results.cache_bytes(2) or 1 << 20)),),
            )
            groups.append(Group((operation,), run))
    return groups


def _kv_token_bytes(spec: ModelSpec) -> int:
    """K and V of a token in bfloat16, all layers."""
    return 4 * spec.num_kv_heads * spec.head_dim * spec.num_layers


def _last_cache_bytes() -> int:
    return results.cache_bytes(3) or _DEFAULT_LAST_CACHE_BYTES


def _blocks(context: int) -> int:
    return -(-context // BLOCK_SIZE)
