"""Request states, block pools, prefix index, scheduler and loop. No tensors, no text, no HTTP.

`EngineLoop` takes messages from an `Inbox`, lets a `Scheduler` decide steps, has an `Executor` compute them, and sends what
happened to an `Outbox`. Before anything is started, `check_scheduling` finds settings
that cannot be, `token_budget` gives the tokens per step of a configuration, `blocks_needed` the blocks a sequence takes, and
`capacity_tokens` how long a request a KV layout can hold. `DEFAULT_LEAST_PART` holds for executors that do not tell theirs.
"""

from octavo.engine.kv import blocks_needed, capacity_tokens
from octavo.engine.loop import EngineLoop
from octavo.engine.scheduler import DEFAULT_LEAST_PART, Scheduler
from octavo.engine.settings import check_scheduling, token_budget

__all__ = [
    "DEFAULT_LEAST_PART",
    "EngineLoop",
    "Scheduler",
    "blocks_needed",
    "capacity_tokens",
    "check_scheduling",
    "token_budget",
]
