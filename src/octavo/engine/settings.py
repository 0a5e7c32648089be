"""What a scheduler's configuration comes to: tokens per step, bounds on long prompts, the policy. Contradictions are found here.

This module does not know requests' states or steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.config import SchedulerConfig
from octavo.engine.policy import Fair, FirstComeFirstServed, Policy, Priority, Size
from octavo.errors import ConfigError

DEFAULT_TOKEN_BUDGET = 512
"""Tokens per step: enough rows for efficient matrix products, few enough that a decode beside a prefill stays fluent."""

MAX_NUM_SEQS = 65_536
"""Every slot costs memory from the start."""

CHUNK_PER_DECODE = 4
"""Tokens of long prompts in a step for each request that decodes in it: more decodes make it longer by themselves, and are worth a longer
one. On a CPU, where a step's time grows in proportion to its tokens from a few on, small chunks cost little."""

MAX_SCHEDULER_STEPS = 64
"""Nobody is heard or told anything meanwhile."""

DEFAULT_PRIORITY_AGEING_S = 60.0


def token_budget(config: SchedulerConfig, max_model_len: int) -> int:
    """Most tokens computed in one step: as configured, else enough for the settings beside it.

    Raises ConfigError when the settings contradict each other.
    """
    budget = config.max_num_batched_tokens
    if budget is None:
        budget = max(DEFAULT_TOKEN_BUDGET, config.max_num_seqs, 0 if config.enable_chunked_prefill else max_model_len)
    if not 1 <= config.max_num_seqs <= MAX_NUM_SEQS:
        raise ConfigError(
            f"--max-num-seqs is {config.max_num_seqs}; it must be 1 to {MAX_NUM_SEQS}", param="max_num_seqs"
        )
    if budget < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({budget}) is below --max-num-seqs ({config.max_num_seqs}), so a step could not serve all running "
            "sequences; raise the first or lower the second",
            param="max_num_batched_tokens",
        )
    if not config.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill computes a prompt in one step, so --max-num-batched-tokens ({budget}) must be at least "
            f"--max-model-len ({max_model_len}); raise the first or lower the second",
            param="max_num_batched_tokens",
        )
    return budget


def check_scheduling(config: SchedulerConfig) -> None:
    """Raises ConfigError for what no model can make right: numbers out of bounds, settings that contradict each other."""
    for flag, value, low in (
        ("long-prefill-token-threshold", config.long_prefill_token_threshold, 0),
        ("max-long-partial-prefills", config.max_long_partial_prefills, 1),
        ("num-scheduler-steps", config.num_scheduler_steps, 1),
    ):
        if value is not None and value < low:
            raise ConfigError(f"--{flag} is {value}; it must be at least {low}", param=flag.replace("-", "_"))
    if (config.num_scheduler_steps or 1) > MAX_SCHEDULER_STEPS:
        raise ConfigError(
            f"--num-scheduler-steps is {config.num_scheduler_steps}; it must be 1 to {MAX_SCHEDULER_STEPS}",
            param="num_scheduler_steps",
        )
    for flag, limit in (
        ("priority-ageing", config.priority_ageing),
        ("waiting-timeout", config.waiting_timeout),
        ("prefill-timeout", config.prefill_timeout),
        ("decode-timeout", config.decode_timeout),
    ):
        if limit is not None and not 0.0 < limit < math.inf:
            raise ConfigError(
                f"--{flag} is {limit:g}; it must be a number of seconds above 0", param=flag.replace("-", "_")
            )
    prefill_bounds(config, 1)
    make_policy(config, lambda request: 0.0)


@dataclass(frozen=True, slots=True)
class PrefillBounds:
    """`long`: tokens beyond which what is to be computed of a request is long. `least_chunk` and `per_decode`: how many tokens of long
    ones a step may hold beside decodes. `most`: long ones that are partly computed at the same time.
    """

    long: float
    least_chunk: float
    per_decode: int
    most: int

    def chunk(self, num_decodes: int) -> float:
        """Most tokens of long prompts in a step in which so many requests decode."""
        return max(self.least_chunk, self.per_decode * num_decodes)


def prefill_bounds(config: SchedulerConfig, budget: int) -> PrefillBounds:
    """The bounds on long prompts in steps of `budget` tokens.

    Raises ConfigError for bounds given with chunked prefill off, which splits nothing.
    """
    threshold, most = config.long_prefill_token_threshold, config.max_long_partial_prefills
    if not config.enable_chunked_prefill:
        for flag, value in (("long-prefill-token-threshold", threshold), ("max-long-partial-prefills", most)):
            if value is not None:
                raise ConfigError(
                    f"--{flag} says how long prompts are split, which --no-enable-chunked-prefill rules out; leave out one of them",
                    param=flag.replace("-", "_"),
                )
    if threshold == 0 or not config.enable_chunked_prefill:
        return PrefillBounds(long=math.inf, least_chunk=math.inf, per_decode=0, most=most or 1)
    if threshold is None:
        return PrefillBounds(
            long=budget // 2, least_chunk=max(1, budget // 6), per_decode=CHUNK_PER_DECODE, most=most or 1
        )
    return PrefillBounds(long=threshold, least_chunk=threshold, per_decode=0, most=most or 1)


def tenant_weights(config: SchedulerConfig) -> dict[str, float]:
    """Weights by tenant. Raises ConfigError for one that is no positive number, or given twice."""
    weights: dict[str, float] = {}
    for text in config.tenant_weights:
        name, _, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not 0.0 < weight < math.inf:
            raise ConfigError(
                f"--tenant-weights has {text[:80]!r}; expected NAME=NUMBER with a number above 0",
                param="tenant_weights",
            )
        if name in weights:
            raise ConfigError(
                f"--tenant-weights names {name[:80]!r} twice; give each tenant once", param="tenant_weights"
            )
        weights[name] = weight
    return weights


def make_policy(config: SchedulerConfig, size: Size) -> Policy:
    """The configured policy. Raises ConfigError for settings of a policy that is not the configured one."""
    policy = config.scheduling_policy
    for flag, given, needed in (
        ("priority-ageing", config.priority_ageing is not None, "priority"),
        ("tenant-weights", bool(config.tenant_weights), "fair"),
    ):
        if given and policy != needed:
            raise ConfigError(
                f"--{flag} needs --scheduling-policy {needed}, but it is {policy}", param=flag.replace("-", "_")
            )
    if policy == "priority":
        return Priority(config.priority_ageing or DEFAULT_PRIORITY_AGEING_S)
    return Fair(tenant_weights(config), size) if policy == "fair" else FirstComeFirstServed()
