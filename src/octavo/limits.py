"""Every fixed bound on what a client may send, in one place. `docs/reference/limits.md` is made from this module.

Bounds that depend on a deployment are flags (`--max-body-bytes`, `--max-header-bytes`, `--max-logprobs`, `--max-model-len`,
`--max-num-queued-reqs`). This module does not know who applies a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# --- HTTP -----------------------------------------------------------------------------------------------------------

MAX_HEADERS = 128
"""Headers of one request."""
HEAD_TIMEOUT_S = 20.0
"""Seconds for the head of a request to arrive."""
BODY_TIMEOUT_S = 60.0
"""Seconds for the body of a request to arrive."""
UNREAD_TIMEOUT_S = 300.0
"""Seconds that a client may take not one byte of a waiting answer. Long, because a receiver with a large window tells of its reading only
now and then."""
MAX_REQUEST_ID_CHARACTERS = 128
"""Printable ASCII characters of `X-Request-Id` or `request_id`."""

# --- JSON -----------------------------------------------------------------------------------------------------------

MAX_JSON_PARTS = 100_000
"""Lists, objects and members of objects in one body."""
MAX_JSON_DEPTH = 256
"""Levels of lists and objects in one body."""

# --- generation -----------------------------------------------------------------------------------------------------

MAX_PROMPTS = 256
"""Prompts of one text completion."""
MAX_CHOICES = 128
"""`n` and `best_of`: choices for each prompt."""
MAX_BEAM_WIDTH = 64
"""Beams of a search, offline."""
MAX_STOP_STRINGS = 16
"""Strings in `stop`."""
MAX_STOP_CHARACTERS = 1024
"""Characters of each string in `stop` and `bad_words`."""
MAX_STOP_TOKEN_IDS = 1024
"""Ids in `stop_token_ids`."""
MAX_LOGIT_BIAS = 1024
"""Ids in `logit_bias`; each value is from -100 to 100."""
MAX_BAD_WORDS = 1024
"""Texts in `bad_words`."""
MAX_TOKENS = 2**31 - 1
"""Largest number of tokens a field may name; what the context has room for is the real bound."""
MAX_TEMPERATURE = 100.0
"""Highest temperature offline; the HTTP API keeps OpenAI's 2."""
MAX_STREAM_INTERVAL = 1024
"""`stream_interval`: tokens in one chunk of a stream."""
MAX_PRIORITY = 2**31
"""`priority` is from minus this up to, but not including, this."""
MAX_SALT_CHARACTERS = 1024
"""Characters of `cache_salt`."""

# --- conversations --------------------------------------------------------------------------------------------------

MAX_NESTING = 64
"""Levels of lists and objects within a message, a tool or a chat template argument."""
MAX_TEMPLATE_CHARACTERS = 1 << 20
"""Characters of a chat template."""
TEMPLATE_CPU_S = 1.0
"""Seconds of CPU time to render a conversation."""
MAX_RENDERED_CHARACTERS = 1 << 25
"""Characters of a rendered conversation."""

# --- schemas and tools ----------------------------------------------------------------------------------------------

MAX_TOOLS = 128
"""Tools of one request."""
MAX_TOOL_NAME_CHARACTERS = 64
"""Characters of a tool's name: letters, digits, underscores and dashes."""
MAX_SCHEMA_BYTES = 1 << 20
"""JSON bytes of one schema, and characters of one regular expression or grammar."""

MAX_GRAMMAR_COPIES_BYTES = 16 << 20
"""Characters of a compiled grammar times the choices it constrains."""


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than so many levels deep; what is neither has no level."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [outer for outer in layer if isinstance(outer, (Mapping, list, tuple))]
        if not layer:
            return False
        layer = [inner for outer in layer for inner in (outer.values() if isinstance(outer, Mapping) else outer)]
    return True
