"""The KV cache's metrics: totals of what steps report, and the present sizes. `vllm:` names where vLLM has them, else `octavo:`.

This module does not know what a block or a file is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo.contracts import CacheStats

_COUNTERS: dict[str, tuple[str, str]] = {
    "external_prefix_cache_queries": ("vllm", "Prompt tokens looked for on disk because the prefix cache lacks them."),
    "external_prefix_cache_hits": ("vllm", "Prompt tokens found on disk."),
    "kv_offload_store_bytes": ("vllm", "KV content written to disk."),
    "kv_offload_store_time": ("vllm", "Seconds of writing KV content to disk, beside the steps."),
    "kv_offload_load_bytes": ("vllm", "KV content read from disk."),
    "kv_offload_load_time": ("vllm", "Seconds of reading KV content from disk, beside the steps."),
    "kv_block_evictions": ("octavo", "Cached blocks given out for other content."),
    "kv_block_copies": ("octavo", "Blocks in which a prompt ends, copied instead of computed again."),
    "prefix_cache_waits": ("octavo", "Times that a sequence began to wait for blocks another computes, or from disk."),
}
_SOURCES = ("device", "host", "disk")
_DIRECTIONS = ("out", "in")
_EVENTS = ("saved", "unsaved", "fetched", "missing")


class CacheMetrics:
    """Adds up the statistics of steps."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._cached = dict.fromkeys(_SOURCES, 0)
        self._swapped = dict.fromkeys(_DIRECTIONS, 0)
        self._files = dict.fromkeys(_EVENTS, 0)
        self._sizes = {"swap_used_bytes": 0, "kv_files_bytes": 0, "pinned_tokens": 0}

    def add(self, stats: CacheStats) -> None:
        """Adds those of a step."""
        counters = self._counters
        counters["external_prefix_cache_queries"] += stats.disk_query_tokens
        counters["external_prefix_cache_hits"] += stats.disk_hit_tokens
        counters["kv_offload_store_bytes"] += stats.write_bytes
        counters["kv_offload_store_time"] += stats.write_s
        counters["kv_offload_load_bytes"] += stats.fetch_bytes
        counters["kv_offload_load_time"] += stats.fetch_s
        counters["kv_block_evictions"] += stats.evicted_blocks
        counters["kv_block_copies"] += stats.copied_blocks
        counters["prefix_cache_waits"] += stats.waits
        self._cached["device"] += stats.device_hit_tokens
        self._cached["host"] += stats.host_hit_tokens
        self._cached["disk"] += stats.disk_hit_tokens
        self._swapped["out"] += stats.swapped_out_blocks
        self._swapped["in"] += stats.swapped_in_blocks
        self._files["saved"] += stats.saved_files
        self._files["unsaved"] += stats.unsaved_files
        self._files["fetched"] += stats.fetched_files
        self._files["missing"] += stats.missing_files
        self._sizes = {
            "swap_used_bytes": stats.swap_bytes,
            "kv_files_bytes": stats.disk_bytes,
            "pinned_tokens": stats.pinned_tokens,
        }

    def collect(self, labels: Sequence[str]) -> Iterator[Metric]:
        """All metrics, with the values of the labels `model_name` and `engine`."""
        names = ("model_name", "engine")
        for name, (prefix, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"{prefix}:{name}", text, labels=names)
            counter.add_metric(labels, self._counters[name])
            yield counter
        cached = CounterMetricFamily("vllm:prompt_tokens_cached", "Prompt tokens not computed.", labels=names)
        cached.add_metric(labels, sum(self._cached.values()))
        yield cached
        for name, text, label, counts in (
            ("vllm:prompt_tokens_cached_by_source", "Prompt tokens not computed.", "source", self._cached),
            ("octavo:swap_blocks", "Blocks of preempted sequences moved out and in.", "direction", self._swapped),
            ("octavo:kv_files", "Files of KV content, by what happened to them.", "event", self._files),
        ):
            family = CounterMetricFamily(name, text, labels=(*names, label))
            for value, count in counts.items():
                family.add_metric((*labels, value), count)
            yield family
        for name, text in (
            ("swap_used_bytes", "Memory for blocks of preempted sequences."),
            ("kv_files_bytes", "Size of all files of KV content."),
            ("pinned_tokens", "Tokens pinned in the prefix cache."),
        ):
            gauge = GaugeMetricFamily(f"octavo:{name}", text, labels=names)
            gauge.add_metric(labels, self._sizes[name])
            yield gauge
