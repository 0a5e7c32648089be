"""Prometheus metrics, a sink of the event log. Names and buckets are vLLM's, so that existing dashboards work unchanged.

Counting is plain Python per event; Prometheus objects are only built when somebody scrapes. Nothing else in the server counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.contracts import FinishReason, ForwardWork, RequestTimes, StepStats
from octavo.obs.cache_metrics import CacheMetrics
from octavo.obs.events import EngineStateChanged, Event, HttpRequestDone, RequestReceived, RequestRefused, StepCompleted

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_ROWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def _series_1_2_5(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to and including the last value not above `limit`."""
    values: list[int] = []
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if factor * scale > limit:
                return tuple(values) or (1,)
            values.append(factor * scale)
        scale *= 10


class _Histogram:
    """Counts per bucket and a sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), cumulative))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """The sink and the collector. Called from the event loop only."""

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name, "0")
        self._cache_info: dict[str, str] = {}
        self._latest = StepStats(step=0, num_running=0, num_waiting=0, kv_usage=0.0)
        self._work: ForwardWork | None = None
        self._cache = CacheMetrics()
        self._counters: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._finished: dict[str, int] = {reason.value: 0 for reason in FinishReason}
        self._errors: dict[str, int] = {}
        self._tenants: dict[str, list[int]] = {}
        self._rejections: dict[str, int] = {}
        self._http: dict[tuple[str, str, str], int] = {}
        self._http_duration: dict[tuple[str, str], _Histogram] = {}
        self._displaced = 0
        self._state = "loading"
        self._histograms = _histograms(8192)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def describe_model(self, model_name: str, max_model_len: int, cache_info: dict[str, str]) -> None:
        """What is known once the model is loaded, before any token was counted: its name, the bound of token-count buckets, and the
        labels of `vllm:cache_config_info`."""
        self._labels = (model_name, "0")
        self._cache_info = dict(cache_info)
        self._histograms = _histograms(max_model_len)

    def __call__(self, event: Event) -> None:
        """Takes one event of the log."""
        match event:
            case StepCompleted(stats=stats):
                self._step(stats)
            case HttpRequestDone(handler=handler, method=method, status=status, duration_s=duration_s):
                key = (handler, method, str(status))
                self._http[key] = self._http.get(key, 0) + 1
                if (handler, method) not in self._http_duration:
                    self._http_duration[handler, method] = _Histogram(_HTTP_S)
                self._http_duration[handler, method].observe(duration_s)
            case RequestRefused(code=code):
                self._rejections[code] = self._rejections.get(code, 0) + 1
            case RequestReceived(choices=choices):
                self._histograms["request_params_n"].observe(choices)
            case EngineStateChanged(state=state):
                self._state = state

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def _step(self, stats: StepStats) -> None:
        self._latest = stats
        self._work = stats.work or self._work
        counters, histograms = self._counters, self._histograms
        counters["prompt_tokens"] += stats.num_prompt_tokens
        counters["generation_tokens"] += stats.num_generated_tokens
        counters["num_preemptions"] += stats.num_preemptions
        self._displaced += stats.num_displaced
        if stats.num_prefill_rows or stats.num_decode_rows:
            histograms["step_prefill_rows"].observe(stats.num_prefill_rows)
            histograms["step_prefill_tokens"].observe(stats.num_prefill_tokens)
            histograms["step_decode_rows"].observe(stats.num_decode_rows)
        counters["prefix_cache_queries"] += stats.prefix_cache_queries
        counters["prefix_cache_hits"] += stats.prefix_cache_hits
        if stats.cache is not None:
            self._cache.add(stats.cache)
        if stats.num_prompt_tokens or stats.num_generated_tokens:
            histograms["iteration_tokens_total"].observe(stats.num_prompt_tokens + stats.num_generated_tokens)
        for value in stats.ttft_s:
            histograms["time_to_first_token_seconds"].observe(value)
        for value in stats.itl_s:
            histograms["inter_token_latency_seconds"].observe(value)
        for request in stats.finished:
            self._request(request)

    def _request(self, times: RequestTimes) -> None:
        self._finished[times.finish_reason.value] += 1
        histograms = self._histograms
        histograms["e2e_request_latency_seconds"].observe(times.finished_s - times.arrival_s)
        histograms["request_prompt_tokens"].observe(times.num_prompt_tokens)
        histograms["request_generation_tokens"].observe(times.num_generated_tokens)
        histograms["request_params_max_tokens"].observe(times.max_tokens)
        histograms["request_num_preemptions"].observe(times.num_preemptions)
        if times.error_code is not None:
            self._errors[times.error_code] = self._errors.get(times.error_code, 0) + 1
        tokens = self._tenants.setdefault(times.tenant, [0, 0])
        tokens[0] += times.num_prompt_tokens
        tokens[1] += times.num_generated_tokens
        if times.scheduled_s is None:
            return
        histograms["request_queue_time_seconds"].observe(times.scheduled_s - times.arrival_s)
        histograms["request_inference_time_seconds"].observe(times.finished_s - times.scheduled_s)
        if times.first_token_s is None:
            return
        histograms["request_prefill_time_seconds"].observe(times.first_token_s - times.scheduled_s)
        decode_s = times.finished_s - times.first_token_s
        histograms["request_decode_time_seconds"].observe(decode_s)
        if times.num_generated_tokens > 1:
            histograms["request_time_per_output_token_seconds"].observe(decode_s / (times.num_generated_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client on a scrape."""
        names = ("model_name", "engine")
        for name, text, value in (
            ("num_requests_running", "Sequences in the running batch.", self._latest.num_running),
            ("num_requests_waiting", "Sequences waiting to run.", self._latest.num_waiting),
            ("kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", self._latest.kv_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield from self._collect_scheduling(names)
        if self._work is not None and self._work.forward_s > 0:
            yield from self._collect_work(self._work, names)
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=names)
            counter.add_metric(self._labels, self._counters[name])
            yield counter
        yield from self._cache.collect(self._labels)
        success = CounterMetricFamily(
            "vllm:request_success", "Ended sequences by reason.", labels=(*names, "finished_reason")
        )
        for reason, count in self._finished.items():
            success.add_metric((*self._labels, reason), count)
        yield success
        for name, (_, text) in _HISTOGRAMS.items():
            prefix = "octavo" if name.startswith("step_") else "vllm"
            histogram = HistogramMetricFamily(f"{prefix}:{name}", text, labels=names)
            self._histograms[name].add_to(histogram, self._labels)
            yield histogram
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused at the door by reason.", labels=("model_name", "reason")
        )
        for code, count in self._rejections.items():
            rejections.add_metric((self._labels[0], code), count)
        yield rejections
        if self._cache_info:
            info = GaugeMetricFamily(
                "vllm:cache_config_info", "KV cache configuration.", labels=tuple(self._cache_info)
            )
            info.add_metric(tuple(self._cache_info.values()), 1)
            yield info
        yield from self._collect_http()
        state = GaugeMetricFamily("octavo:engine_state", "1 for the state the engine is in.", labels=("state",))
        for name in ("loading", "ready", "draining", "dead"):
            state.add_metric((name,), float(name == self._state))
        yield state

    def _collect_scheduling(self, names: Sequence[str]) -> Iterable[Metric]:
        latest = self._latest
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences waiting for slots, KV blocks or budget (capacity), or held back for others' sake (deferred).",
            labels=(*names, "reason"),
        )
        waiting.add_metric((*self._labels, "capacity"), latest.num_waiting - latest.num_deferred)
        waiting.add_metric((*self._labels, "deferred"), latest.num_deferred)
        preemptions = CounterMetricFamily(
            "octavo:preemptions_by_reason",
            "Preemptions for want of KV blocks, or to make room for a sequence that goes first by the policy.",
            labels=(*names, "reason"),
        )
        preemptions.add_metric((*self._labels, "kv_blocks"), self._counters["num_preemptions"] - self._displaced)
        preemptions.add_metric((*self._labels, "policy"), self._displaced)
        errors = CounterMetricFamily(
            "octavo:request_errors", "Sequences that ended in an error, by its code.", labels=(*names, "code")
        )
        for code, count in self._errors.items():
            errors.add_metric((*self._labels, code), count)
        tokens = CounterMetricFamily(
            "octavo:tenant_tokens", "Tokens of ended sequences by tenant.", labels=(*names, "tenant", "kind")
        )
        for tenant, (prompt, generated) in self._tenants.items():
            tokens.add_metric((*self._labels, tenant, "prompt"), prompt)
            tokens.add_metric((*self._labels, tenant, "generation"), generated)
        return (waiting, preemptions, errors, tokens)

    def _collect_work(self, work: ForwardWork, names: Sequence[str]) -> Iterable[Metric]:
        for name, text, amount in (
            (
                "step_read_bytes_per_second",
                "Weights and KV that the last step had to read, over the time of its forward.",
                work.weight_bytes + work.kv_bytes,
            ),
            (
                "step_ops_per_second",
                "Products and sums of matrices and attention in the last step, over the time of its forward.",
                work.ops,
            ),
        ):
            gauge = GaugeMetricFamily(f"octavo:{name}", text, labels=names)
            gauge.add_metric(self._labels, amount / work.forward_s)
            yield gauge

    def _collect_http(self) -> Iterable[Metric]:
        total = CounterMetricFamily("http_requests", "HTTP exchanges.", labels=("handler", "method", "status"))
        for key, count in self._http.items():
            total.add_metric(key, count)
        duration = HistogramMetricFamily(
            "http_request_duration_seconds", "Time from request to end of answer.", labels=("handler", "method")
        )
        for labels, histogram in self._http_duration.items():
            histogram.add_to(duration, labels)
        return (total, duration)


_COUNTERS = {
    "prompt_tokens": "Prompt tokens computed.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Running sequences sent back to waiting.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}
_HISTOGRAMS: dict[str, tuple[Sequence[float] | None, str]] = {
    "time_to_first_token_seconds": (_TTFT_S, "Arrival to first token."),
    "inter_token_latency_seconds": (_ITL_S, "Time between two tokens of a sequence."),
    "request_time_per_output_token_seconds": (_ITL_S, "Decode time of a sequence over its tokens but the first."),
    "e2e_request_latency_seconds": (_LATENCY_S, "Arrival to end."),
    "request_queue_time_seconds": (_LATENCY_S, "Arrival to first scheduling."),
    "request_inference_time_seconds": (_LATENCY_S, "First scheduling to end."),
    "request_prefill_time_seconds": (_LATENCY_S, "First scheduling to first token."),
    "request_decode_time_seconds": (_LATENCY_S, "First token to end."),
    "iteration_tokens_total": (_STEP_TOKENS, "Tokens per step."),
    "step_prefill_rows": (_STEP_ROWS, "Sequences per step of which the prompt, or what was preempted, is computed."),
    "step_prefill_tokens": (_STEP_TOKENS, "Tokens per step of such sequences."),
    "step_decode_rows": (_STEP_ROWS, "Sequences per step that generate, one token each."),
    "request_prompt_tokens": (None, "Prompt tokens per sequence."),
    "request_generation_tokens": (None, "Generated tokens per sequence."),
    "request_params_max_tokens": (None, "max_tokens per sequence."),
    "request_num_preemptions": ((0, 1, 2, 3, 5, 10, 20, 50, 100), "Preemptions per sequence."),
    "request_params_n": ((1, 2, 5, 10, 20), "n per request."),
}


def _histograms(max_model_len: int) -> dict[str, _Histogram]:
    tokens = _series_1_2_5(max_model_len)
    return {name: _Histogram(tokens if bounds is None else bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
