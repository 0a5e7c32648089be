"""Memory budget and context length: what is refused, what is reduced, what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from octavo.contracts import KVGroup, KVLayout
from octavo.errors import ConfigError
from octavo.frontend.build import (
    Budget,
    _namespace,
    budget_memory,
    load_front,
    open_engine,
    parse_bytes,
    resolve_scheduler,
)
from octavo.frontend.link import Hooks
from octavo.loaders.checkpoint import open_checkpoint

MIB = 1 << 20
BYTES_PER_TOKEN = 1024
GROUPS = (KVGroup(layers=(0, 1), bytes_per_token=BYTES_PER_TOKEN),)


def budget(
    context: int = 1000, free: int = 1000 * MIB, weights: int = 100 * MIB, asked: int | None = None, **cache: Any
) -> Budget:
    config = Config(model=ModelConfig(max_model_len=asked), cache=CacheConfig(**cache))
    return budget_memory(config, GROUPS, context, free, weights)


def tokens(result: Budget) -> int:
    return result.layout.num_blocks[0] * result.layout.block_size


def test_default_is_a_quarter_of_what_is_free() -> None:
    result = budget(context=100_000)
    assert tokens(result) == 225 * MIB // BYTES_PER_TOKEN
    assert (result.max_model_len, result.warnings) == (100_000, ())


def test_default_is_at_most_a_gibibyte() -> None:
    assert tokens(budget(context=100_000, free=100_000 * MIB)) == 1024 * MIB // BYTES_PER_TOKEN


def test_no_more_than_all_slots_can_use() -> None:
    assert tokens(budget(context=160)) == 64 * 160


def test_default_context_that_does_not_fit_is_reduced_with_a_warning() -> None:
    result = budget(context=1_000_000)
    assert result.max_model_len == 225 * MIB // BYTES_PER_TOKEN
    [warning] = result.warnings
    assert "1000000" in warning
    assert str(result.max_model_len) in warning


def test_explicit_context_that_does_not_fit_is_refused_with_the_limit() -> None:
    with pytest.raises(ConfigError, match=str(225 * MIB // BYTES_PER_TOKEN)) as refusal:
        budget(context=1_000_000, asked=500_000)
    assert refusal.value.param == "max_model_len"
    assert budget(context=1_000_000, asked=5000).max_model_len == 5000


def test_kv_cache_memory_is_taken_as_it_is() -> None:
    assert tokens(budget(context=100_000, kv_cache_memory="512M")) == 512 * MIB // BYTES_PER_TOKEN
    with pytest.raises(ConfigError, match="free"):
        budget(kv_cache_memory="901M", context=100_000)


def test_utilization_is_a_share_of_the_free_memory_less_the_weights() -> None:
    assert tokens(budget(context=100_000, gpu_memory_utilization=0.5)) == 400 * MIB // BYTES_PER_TOKEN
    for share in (0.0, -1.0, 1.01, float("nan")):
        with pytest.raises(ConfigError) as refusal:
            budget(gpu_memory_utilization=share)
        assert refusal.value.param == "gpu_memory_utilization"


@pytest.mark.parametrize("cache", [{"gpu_memory_utilization": 0.05}, {"kv_cache_memory": "1K"}])
def test_no_room_for_a_block_is_refused(cache: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        budget(**cache)


@given(st.integers(1, 200_000), st.integers(1, 2000), st.integers(0, 1000), st.sampled_from([8, 16, 32]))
def test_one_full_request_always_fits(context: int, free_mib: int, weights_mib: int, block_size: int) -> None:
    try:
        result = budget(context=context, free=free_mib * MIB, weights=weights_mib * MIB, block_size=block_size)
    except ConfigError:
        assert free_mib - weights_mib < 1
        return
    assert 1 <= result.max_model_len <= context
    assert tokens(result) >= result.max_model_len
    assert tokens(result) * BYTES_PER_TOKEN <= max(free_mib - weights_mib, 0) * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("1073741824", 1 << 30), ("512M", 512 * MIB), ("2G", 2 << 30), ("1.5GiB", 3 << 29), ("8kb", 8192)],
)
def test_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text, "kv-cache-memory") == expected


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1e9", "1 000", "9" * 30])
def test_bad_bytes(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        parse_bytes(text, "kv-cache-memory")


def test_batched_tokens_default() -> None:
    def resolved(**values: Any) -> int | None:
        return resolve_scheduler(SchedulerConfig(**values), 4096).max_num_batched_tokens

    assert resolved() == 512
    assert resolved(max_num_seqs=1000) == 1000
    assert resolved(enable_chunked_prefill=False) == 4096
    assert resolved(max_num_batched_tokens=64) == 64
    with pytest.raises(ConfigError):
        resolved(max_num_batched_tokens=0)


def test_a_wrong_bound_of_logprobs_is_refused_before_anything_is_loaded() -> None:
    hooks = Hooks(on_output=lambda output: None, on_death=lambda reason: None)
    config = Config(model=ModelConfig(model="no-such-model", max_logprobs=-2))
    with pytest.raises(ConfigError, match="--max-logprobs"):
        open_engine(config, hooks)


TINY = Path(__file__).parents[2] / "golden" / "tiny-llama"
SHOWS = "{{ messages[0].content }} {{ style }}"


def rendered(**model: Any) -> str:
    front = load_front(open_checkpoint(str(TINY)), Config(model=ModelConfig(**model)))
    assert front.chat_template is not None
    return front.chat_template.render([{"role": "user", "content": "hi"}])


def test_a_chat_template_is_a_file_or_itself(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(SHOWS)
    for template in (str(file), SHOWS):
        assert rendered(chat_template=template) == "hi "
        assert rendered(chat_template=template, default_chat_template_kwargs='{"style": "terse"}') == "hi terse"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("chat_template", "missing.jinja", "cannot be read"),
        ("chat_template", "{% if %}", "syntax error"),
        ("default_chat_template_kwargs", "[1]", "no JSON object"),
        ("default_chat_template_kwargs", "{", "no JSON object"),
        ("default_chat_template_kwargs", '{"tools": []}', "reserved"),
    ],
)
def test_a_template_that_cannot_be_is_told_at_the_start(field: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refusal:
        rendered(**{"chat_template": SHOWS, field: value})
    assert refusal.value.param == field


def test_the_cache_namespace_holds_all_that_decides_bytes() -> None:
    """O-29: another arithmetic version, KV format, block size or layout of layers is another cache."""
    groups = (KVGroup(layers=(0, 1), num_kv_heads=2, head_dim=64),)
    layout = KVLayout(block_size=16, groups=groups, num_blocks=(100,))
    same = KVLayout(block_size=16, groups=groups, num_blocks=(7,))
    others = [
        _namespace(b"other weights", "cpu-2-kv-bfloat16", layout),
        _namespace(b"weights", "cpu-3-kv-bfloat16", layout),
        _namespace(b"weights", "cpu-2-kv-int8", layout),
        _namespace(b"weights", "cpu-2-kv-bfloat16", KVLayout(block_size=8, groups=groups, num_blocks=(100,))),
        _namespace(
            b"weights",
            "cpu-2-kv-bfloat16",
            KVLayout(block_size=16, groups=(KVGroup(layers=(0, 1), num_kv_heads=4, head_dim=32),), num_blocks=(100,)),
        ),
    ]
    own = _namespace(b"weights", "cpu-2-kv-bfloat16", layout)
    assert own == _namespace(b"weights", "cpu-2-kv-bfloat16", same)
    assert len({own, *others}) == 6


def test_a_folder_for_files_needs_their_size() -> None:
    with pytest.raises(ConfigError, match="kv-offloading-size"):
        open_engine(
            Config(
                model=ModelConfig(model=str(Path(__file__).parents[2] / "golden" / "tiny-llama")),
                cache=CacheConfig(kv_offloading_folder="somewhere"),
            ),
            Hooks(on_output=lambda output: None, on_death=lambda reason: None),
        )
