"""The metrics sink and the event log."""

from __future__ import annotations

import logging

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.contracts import CacheStats, FinishReason, ForwardWork, RequestId, RequestTimes, StepStats
from octavo.obs.events import EngineStateChanged, EventLog, HttpRequestDone, RequestRefused, StepCompleted
from octavo.obs.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = [v for (n, has), v in samples(metrics).items() if n == name and labels.items() <= dict(has).items()]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def finished(**fields: object) -> RequestTimes:
    base = {
        "request_id": RequestId("r"), "finish_reason": FinishReason.STOP, "arrival_s": 1.0, "scheduled_s": 2.0, "first_token_s": 3.0,
        "finished_s": 5.0, "num_prompt_tokens": 7, "num_cached_tokens": 0, "num_generated_tokens": 5, "num_preemptions": 0, "max_tokens": 5,
    }  # fmt: skip
    return RequestTimes(**{**base, **fields})  # type: ignore[arg-type]


def test_the_last_forward_is_a_rate() -> None:
    metrics = Metrics("m")
    assert "octavo:step_ops" not in metrics.render().decode()
    idle = StepStats(step=1, num_running=0, num_waiting=0, kv_usage=0.0)
    work = ForwardWork(forward_s=0.5, weight_bytes=1000, kv_bytes=200, ops=70_000)
    metrics(StepCompleted(msgspec.structs.replace(idle, work=work)))
    metrics(StepCompleted(idle))
    assert value(metrics, "octavo:step_read_bytes_per_second", model_name="m") == 2400
    assert value(metrics, "octavo:step_ops_per_second", model_name="m") == 140_000


def test_a_step_is_counted() -> None:
    metrics = Metrics("m")
    metrics.describe_model("m", 100, {"block_size": "16"})
    stats = StepStats(
        step=1, num_running=3, num_waiting=2, kv_usage=0.25, num_prompt_tokens=10, num_generated_tokens=4, prefix_cache_queries=20,
        prefix_cache_hits=16, ttft_s=(0.03,), itl_s=(0.004, 0.02), finished=(finished(), finished(finish_reason=FinishReason.ABORT)),
    )  # fmt: skip
    metrics(StepCompleted(stats))
    metrics(StepCompleted(stats))
    assert value(metrics, "vllm:num_requests_running", model_name="m") == 3
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:prompt_tokens_total") == 20
    assert value(metrics, "vllm:generation_tokens_total") == 8
    assert value(metrics, "vllm:prefix_cache_hits_total") == 32
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.04") == 2
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.02") == 0
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.048)
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 2
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 16
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == 4
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == 2
    assert value(metrics, "vllm:cache_config_info", block_size="16") == 1


def test_scheduling_is_counted() -> None:
    metrics = Metrics("m")
    late = finished(finish_reason=FinishReason.ERROR, error_code="decode_timeout", tenant="a", num_preemptions=2)
    stats = StepStats(
        step=1, num_running=3, num_waiting=7, kv_usage=0.25, num_deferred=2, num_preemptions=3, num_displaced=1, num_prefill_rows=1,
        num_prefill_tokens=100, num_decode_rows=6, finished=(late, finished(tenant="b"), finished(tenant="b")),
    )  # fmt: skip
    metrics(StepCompleted(stats))
    metrics(StepCompleted(msgspec.structs.replace(stats, num_prefill_rows=0, num_prefill_tokens=0, finished=())))
    metrics(StepCompleted(StepStats(step=2, num_running=3, num_waiting=7, kv_usage=0.25, num_deferred=2)))
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 5
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="deferred") == 2
    assert value(metrics, "octavo:preemptions_by_reason_total", reason="kv_blocks") == 4
    assert value(metrics, "octavo:preemptions_by_reason_total", reason="policy") == 2
    assert value(metrics, "octavo:step_prefill_rows_bucket", le="0.0") == 1
    assert value(metrics, "octavo:step_prefill_tokens_sum") == 100
    assert value(metrics, "octavo:step_decode_rows_sum") == 12
    assert value(metrics, "octavo:step_decode_rows_count") == 2
    assert value(metrics, "octavo:request_errors_total", code="decode_timeout") == 1
    assert value(metrics, "octavo:tenant_tokens_total", tenant="b", kind="prompt") == 14
    assert value(metrics, "octavo:tenant_tokens_total", tenant="a", kind="generation") == 5
    assert value(metrics, "vllm:request_num_preemptions_bucket", le="2.0") == 3
    assert value(metrics, "vllm:request_num_preemptions_bucket", le="1.0") == 2


def test_requests_that_never_ran() -> None:
    metrics = Metrics("m")
    early = finished(scheduled_s=None, first_token_s=None, num_generated_tokens=0, finish_reason=FinishReason.ERROR)
    metrics(StepCompleted(StepStats(step=1, num_running=0, num_waiting=0, kv_usage=0.0, finished=(early,))))
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 0


def test_http_and_state() -> None:
    metrics = Metrics("m")
    metrics(HttpRequestDone("/v1/models", "GET", 200, 0.002))
    metrics(RequestRefused("/v1/completions", 429, "overloaded"))
    metrics(EngineStateChanged("ready"))
    assert value(metrics, "http_requests_total", handler="/v1/models", status="200") == 1
    assert value(metrics, "vllm:admission_rejections_total", reason="overloaded") == 1
    assert value(metrics, "octavo:engine_state", state="ready") == 1
    assert value(metrics, "octavo:engine_state", state="loading") == 0


def test_o45_a_broken_sink_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    log, seen = EventLog(), []

    def broken(event: object) -> None:
        raise ValueError("boom")

    log.add_sink(broken)
    log.add_sink(seen.append)
    with caplog.at_level(logging.CRITICAL):
        log.emit(EngineStateChanged("ready"))
        log.emit(EngineStateChanged("dead"))
    assert len(seen) == 2


def test_the_cache_is_counted_by_source_and_by_what_happened() -> None:
    metrics = Metrics("m")
    idle = StepStats(step=1, num_running=0, num_waiting=0, kv_usage=0.0)
    for swap_bytes in (70, 50):
        cache = CacheStats(
            device_hit_tokens=16, host_hit_tokens=32, disk_hit_tokens=48, disk_query_tokens=64, waits=1, evicted_blocks=5,
            copied_blocks=2, swapped_out_blocks=3, swapped_in_blocks=1, saved_files=4, unsaved_files=1, fetched_files=3, missing_files=2,
            write_bytes=100, write_s=0.25, fetch_bytes=300, fetch_s=0.5, swap_bytes=swap_bytes, disk_bytes=900, pinned_tokens=32,
        )  # fmt: skip
        metrics(StepCompleted(msgspec.structs.replace(idle, cache=cache)))
    metrics(StepCompleted(idle))
    assert value(metrics, "vllm:prompt_tokens_cached_total", model_name="m") == 192
    for source, tokens in (("device", 32), ("host", 64), ("disk", 96)):
        assert value(metrics, "vllm:prompt_tokens_cached_by_source_total", source=source) == tokens
    for name, expected in (
        ("vllm:external_prefix_cache_queries_total", 128), ("vllm:external_prefix_cache_hits_total", 96),
        ("vllm:kv_offload_store_bytes_total", 200), ("vllm:kv_offload_store_time_total", 0.5),
        ("vllm:kv_offload_load_bytes_total", 600), ("vllm:kv_offload_load_time_total", 1.0),
        ("octavo:kv_block_evictions_total", 10), ("octavo:kv_block_copies_total", 4), ("octavo:prefix_cache_waits_total", 2),
        ("octavo:swap_used_bytes", 50), ("octavo:kv_files_bytes", 900), ("octavo:pinned_tokens", 32),
    ):  # fmt: skip
        assert value(metrics, name) == expected, name
    for direction, blocks in (("out", 6), ("in", 2)):
        assert value(metrics, "octavo:swap_blocks_total", direction=direction) == blocks
    for event, files in (("saved", 8), ("unsaved", 2), ("fetched", 6), ("missing", 4)):
        assert value(metrics, "octavo:kv_files_total", event=event) == files
