"""`octavo mock`: an engine without a model, for practising clients. It says the same text to everybody, at a scripted
pace.

A prompt that contains `[error after N]` fails after N tokens, so that clients can practise errors before and in the
middle of an answer. Scheduling, streaming, limits and metrics are those of the real server; nothing here is a
benchmark.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from octavo.config import Config
from octavo.contracts import SlotStart
from octavo.frontend.engine import AsyncEngine
from octavo.frontend.model import ServedModel
from octavo.obs.events import EventLog
from octavo.runner.scripted import RowFailure, ScriptedExecutor
from octavo.text.generic_tools import GENERIC_FORMAT
from octavo.text.template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import byte_level_alphabet

ANSWER = "This is octavo's mock: no model has read your prompt, and every answer is this one. "
DEFAULT_CONTEXT = 8192
_END = "<|end|>"
_ERROR = re.compile(r"\[error after (\d{1,6})\]")
_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def mock_engine(
    config: Config,
    events: EventLog,
    on_death: Callable[[str], None] | None = None,
    *,
    ttft_s: float = 0.0,
    itl_s: float = 0.0,
) -> AsyncEngine:
    """An engine that takes `ttft_s` for each first token and `itl_s` for each further step."""
    words = tuple(dict.fromkeys(re.findall(r"\S+ ?", ANSWER)))
    tokenizer = word_tokenizer(words)
    answer = [tokenizer.special_tokens[_END] + 1 + words.index(word) for word in re.findall(r"\S+ ?", ANSWER)]

    def script(start: SlotStart) -> Sequence[int | Exception]:
        prompt = tokenizer.decode(start.token_ids[: start.num_prompt_tokens], skip_special_tokens=True)
        if found := _ERROR.search(prompt):
            count = min(int(found[1]), start.sampling.max_tokens)
            return [*islice(cycle(answer), count), RowFailure("the prompt asked for this error")]
        if start.sampling.ignore_eos:
            return list(islice(cycle(answer), start.sampling.max_tokens))
        return answer

    model = word_model(config, tokenizer)
    return AsyncEngine.with_executor(
        config,
        events,
        model,
        lambda: ScriptedExecutor(script, ttft_s=ttft_s, itl_s=itl_s, vocab_size=model.vocab_size),
        on_death=on_death,
    )


def word_model(config: Config, tokenizer: Tokenizer) -> ServedModel:
    """A model of nothing but a tokenizer of `word_tokenizer` and a plain chat template."""
    return ServedModel(
        names=config.model.served_model_name or ("mock",),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(_TEMPLATE),
        chat_template_error=None,
        max_model_len=config.model.max_model_len or DEFAULT_CONTEXT,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        created=int(time.time()),
        max_logprobs=config.model.max_logprobs,
        call_format=config.structured.tool_call_parser or GENERIC_FORMAT,
        reasoning_format=config.structured.reasoning_parser,
    )


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """A tokenizer whose ids are the 256 bytes, the end token (256), and the given words from 257 on.

    Text is encoded in bytes; the words are for answers only.
    """
    alphabet = byte_level_alphabet()
    vocabulary = {alphabet[byte]: byte for byte in range(256)}
    spelled = ["".join(alphabet[byte] for byte in word.encode()) for word in words]
    vocabulary.update({word: 257 + index for index, word in enumerate(spelled)})
    end = {"id": 256, "content": _END, "special": True, "normalized": False}
    description = {
        "version": "1.0",
        "added_tokens": [end | {"single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": {**vocabulary, _END: 256}, "merges": []},
    }
    return Tokenizer.from_hf(json.dumps(description).encode(), {"eos_token": _END}, {}, {"eos_token_id": 256})
