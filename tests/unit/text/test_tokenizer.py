"""Tokenizers from GGUF metadata and from Hugging Face files."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from octavo.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from octavo.loaders.gguf import read_gguf
from octavo.text import pretokenizers
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import UNBOUNDED
from support.golden import golden_items
from support.vocabularies import (
    CONTROLS,
    USER_DEFINED_TOKENS,
    byte_level,
    byte_level_metadata,
    hf_byte_level,
    hf_sentencepiece,
    sentencepiece_golden,
    sentencepiece_metadata,
)

BYTE_LEVEL = byte_level()
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece_metadata())
HF = Tokenizer.from_hf(hf_byte_level(), {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, {}, {})

TEXTS = [
    "The quick brown fox",
    "it's he'll I'VE  we'd",
    "1234567 3.14 ①②",
    "  leading, trailing  ",
    "line\nline\r\n\n  indented\t\ttabs",
    "naïve café ÀÉ HTTPServer camelCase",
    "日本語 русский العربية",
    "a/b//c?d=e&f --flag",
    "👩‍👩‍👧 é",
]


def encoded(tokenizer: Tokenizer, text: str, **options: bool) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in tokenizer.encode(text, **options)]


# --- SmolLM2, against the golden data ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(smollm2).metadata)


def test_golden_ids(smollm2_tokenizer: Tokenizer) -> None:
    for item in golden_items():
        assert smollm2_tokenizer.encode(item["rendered"]) == item["prompt_ids"], item["rendered"]
        assert smollm2_tokenizer.decode(item["greedy_ids"], skip_special_tokens=False) == item["greedy_text"]


def test_smollm2_facts(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.adds_bos) == (1, False)
    # <|im_end|> is the file's end token; <|endoftext|> ends a text wherever it exists.
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.special_tokens["<|im_end|>"] == 2
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


@given(
    text=st.text(
        alphabet=st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"),
        max_size=60,
    )
)
def test_smollm2_round_trip(smollm2_tokenizer: Tokenizer, text: str) -> None:
    """Of all text but what its vocabulary has no bytes for."""
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_smollm2_is_built_quickly(smollm2: Path) -> None:
    """A server is ready within a second, so this may take a small part of one (0.1 s measured alone)."""
    metadata = read_gguf(smollm2).metadata
    start = time.thread_time()
    Tokenizer.from_gguf(metadata)
    assert time.thread_time() - start < 0.5


# --- byte-level ---------------------------------------------------------------------------------------------------------


@given(st.text(max_size=40))
def test_byte_level_round_trip(text: str) -> None:
    """Any text, control-token texts too, comes back from its ids."""
    for parse_special in (True, False):
        ids = BYTE_LEVEL.encode(text, add_special_tokens=False, parse_special=parse_special)
        assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


def test_merges_control_and_user_defined_tokens() -> None:
    assert encoded(BYTE_LEVEL, "hello world<|im_end|>") == [b"hello", b" world", b"<|im_end|>"]
    assert encoded(BYTE_LEVEL, "<think>hello</think>") == [b"<think>", b"hello", b"</think>"]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, HF], ids=["byte-level", "sentencepiece", "hf"])
def test_without_parse_special_control_text_is_text(tokenizer: Tokenizer) -> None:
    for text in tokenizer.special_tokens:
        if tokenizer.is_special(tokenizer.special_tokens[text]):
            ids = tokenizer.encode(f"a{text}b", add_special_tokens=False, parse_special=False)
            assert not any(map(tokenizer.is_special, ids))
            assert tokenizer.decode(ids, skip_special_tokens=True) == f"a{text}b"


def test_control_text_that_only_its_token_can_spell_is_refused() -> None:
    """A vocabulary whose merges lead to a control token cannot tell users' text from it."""
    metadata = byte_level_metadata(merges=["s t", "o p"], controls=["stop"])
    metadata["tokenizer.ggml.merges"].append("st op")
    tokenizer = Tokenizer.from_gguf(metadata)
    with pytest.raises(InvalidRequestError, match="stop"):
        tokenizer.encode("stop", parse_special=False)
    with pytest.raises(InvalidRequestError, match="stop"):
        tokenizer.encode_chat(tokenizer.control_guard.protect("stop"), marked=True)


def test_lone_surrogates_are_refused() -> None:
    """O-07: they have no UTF-8 form; a proper pair has."""
    for encode in (BYTE_LEVEL.encode, BYTE_LEVEL.encode_chat):
        with pytest.raises(InvalidRequestError, match="character 5"):
            encode("half \ud83d")
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("\U0001f600"), skip_special_tokens=True) == "\U0001f600"


def test_unused_ids_stand_for_no_text() -> None:
    unused = BYTE_LEVEL.vocab_size - 1
    assert BYTE_LEVEL.token_bytes(unused) == b""
    assert BYTE_LEVEL.decode([unused, unused], skip_special_tokens=False) == ""


def test_ids_that_are_no_tokens_are_refused() -> None:
    """O-01: also negative ones, which Python's lists would take."""
    for token in (-1, BYTE_LEVEL.vocab_size, 2**63):
        with pytest.raises(InvalidRequestError):
            BYTE_LEVEL.decode([0, token], skip_special_tokens=True)
        with pytest.raises(InvalidRequestError):
            BYTE_LEVEL.token_bytes(token)


def test_parts_of_characters_are_displayed_as_such() -> None:
    token = BYTE_LEVEL.pieces.index(b"\xe6")
    assert BYTE_LEVEL.token_text(token) == "\ufffd"
    assert BYTE_LEVEL.token_text(BYTE_LEVEL.pieces.index(b" world")) == " world"


@pytest.mark.parametrize(
    ("pre", "pattern"), [("llama-bpe", "LLAMA3"), ("qwen2", "QWEN2"), ("tekken", "TEKKEN"), ("gpt-4o", "GPT4O")]
)
def test_named_splits_are_the_models_own(pre: str, pattern: str) -> None:
    """The names' patterns, spelled out as in the tokenizer.json of Llama 3, Qwen 2, Mistral Nemo and gpt-oss."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    spelled = {
        "LLAMA3": rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        "QWEN2": rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        "TEKKEN": rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "GPT4O": rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contractions}?|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*"
        rf"{contractions}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
    assert getattr(pretokenizers, pattern) == spelled[pattern]
    assert pretokenizers.split_named(pre).pattern == spelled[pattern]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", "Ġ1234", "Ġ", "Ġx"]),
        ("smollm", "it's 1234", ["it", "'s", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "IT'S 1234\n\n x", ["IT", "'S", "Ġ", "123", "4", "ĊĊ", "Ġx"]),
        ("qwen2", "IT'S 12-a", ["IT", "'S", "Ġ", "1", "2", "-a"]),
        ("tekken", "HTTPServer a/b", ["HTTPServer", "Ġa", "/b"]),
        ("tekken", "camelCase", ["camel", "Case"]),
        ("gpt-4o", "Don't 1234", ["Don't", "Ġ", "123", "4"]),
    ],
)
def test_splits(pre: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in pretokenizers.split_named(pre).build().pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_long_text_in_parts_equals_the_whole(pre: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level(pre=pre)
    text = "\n".join([*TEXTS, "hello world", "some words <|im_end|> and <think> more words"] * 3)
    whole = tokenizer.encode(text)
    monkeypatch.setattr("octavo.text.tokenizer._QUICK_CHARACTERS", 0)
    for size in (1, 7, 50):
        monkeypatch.setattr("octavo.text.tokenizer._PART_CHARACTERS", size)
        assert tokenizer.encode(text) == whole


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="klingon"):
        byte_level(pre="klingon")
    with pytest.raises(UnsupportedModelError, match="rwkv"):
        byte_level(model="rwkv")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None},
        {"tokens": []},
        {"tokens": ["a", 7]},
        {"token_type": [1, 1]},
        {"merges": ["ab"]},
        {"merges": ["x zzz"]},
        {"eos_token_id": 10**6},
        {"bos_token_id": -1},
        {"bos_token_id": "1"},
    ],
    ids=str,
)
def test_damaged_metadata_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        byte_level(**changes)


def test_damaged_byte_tokens_are_refused() -> None:
    golden = sentencepiece_golden()
    tokens = ["<0xZZ>" if token == "<0x41>" else token for token in golden["tokens"]]
    with pytest.raises(ModelFileError, match="0xZZ"):
        Tokenizer.from_gguf(sentencepiece_metadata(tokens=tokens))


# --- BOS and end tokens -------------------------------------------------------------------------------------------------


def test_bos_is_never_doubled() -> None:
    """O-24: a text that already starts with BOS, as templates' do, gets no second one."""
    tokenizer = byte_level(add_bos_token=True)
    assert encoded(tokenizer, "hello") == encoded(tokenizer, "<s>hello") == [b"<s>", b"hello"]
    assert encoded(tokenizer, "hello", add_special_tokens=False) == [b"hello"]
    assert tokenizer.encode("") == [tokenizer.bos_token_id]
    written_by_a_user = encoded(tokenizer, "<s>hello", parse_special=False)
    assert written_by_a_user == [b"<s>", b"<", b"s", b">", b"hello"]


def test_chat_prompts_get_one_bos_and_no_eos() -> None:
    tokenizer = byte_level(add_bos_token=True, add_eos_token=True)
    assert encoded(tokenizer, "hello") == [b"<s>", b"hello", b"</s>"]
    for text in ("hello", "<s>hello"):
        assert tokenizer.encode_chat(text) == [tokenizer.bos_token_id, tokenizer.pieces.index(b"hello")]


@pytest.mark.parametrize(
    ("changes", "adds"),
    [({}, False), ({"pre": "llama-bpe"}, True), ({"pre": "llama-bpe", "add_bos_token": False}, False)],
)
def test_whether_bos_is_added(changes: dict[str, Any], adds: bool) -> None:
    assert byte_level(**changes).adds_bos is adds


def test_sentencepiece_files_add_bos_unless_they_say_otherwise() -> None:
    assert SENTENCEPIECE.adds_bos
    assert not Tokenizer.from_gguf(sentencepiece_metadata(add_bos_token=False)).adds_bos


def test_all_end_tokens_are_found() -> None:
    tokenizer = byte_level(controls=["<s>", "</s>", "<|eot_id|>", "<|end_of_text|>", "<|other|>"], eot_token_id=260)
    named = {tokenizer.token_text(token) for token in tokenizer.eos_token_ids}
    assert named == {"</s>", "<|eot_id|>", "<|end_of_text|>", tokenizer.token_text(260)}
    assert tokenizer.eos_token == "</s>"


# --- SentencePiece ------------------------------------------------------------------------------------------------------


def test_sentencepiece_ids_are_sentencepieces_own() -> None:
    for item in sentencepiece_golden()["items"]:
        ids = SENTENCEPIECE.encode(item["text"], add_special_tokens=False)
        assert ids == item["ids"], item["text"]
        assert SENTENCEPIECE.decode(ids, skip_special_tokens=True) == item["decoded"]


@given(st.text(max_size=40))
def test_sentencepiece_round_trip(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False, parse_special=False)
    # SentencePiece writes spaces as U+2581, so that character itself comes back as a space.
    assert SENTENCEPIECE.decode(ids, skip_special_tokens=True) == text.replace("\u2581", " ")


@given(st.text(alphabet="ab \u2581é", max_size=20))
def test_merging_word_by_word_changes_nothing(text: str) -> None:
    """With a piece that reaches over a space, words are not merged on their own: the same ids for all other text."""
    golden = sentencepiece_golden()
    crossing = Tokenizer.from_gguf(
        sentencepiece_metadata(
            tokens=[*golden["tokens"], "q\u2581q"],
            scores=[*golden["scores"], -999.0],
            token_type=[*golden["token_type"], 1],
        )
    )
    assert crossing.encode(text) == SENTENCEPIECE.encode(text)


def test_space_prefix_can_be_switched_off() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False))
    assert encoded(tokenizer, "octavo", add_special_tokens=False)[0][:1] != b" "
    assert encoded(SENTENCEPIECE, "octavo", add_special_tokens=False)[0][:1] == b" "
    assert tokenizer.decode(tokenizer.encode("  a"), skip_special_tokens=True) == "  a"


def test_derived_tokenizers_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    built = Tokenizer.from_gguf(sentencepiece_metadata(), cache=folder)
    (file,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("octavo.text.gguf_vocabulary._derived_merges", None)
        cached = Tokenizer.from_gguf(sentencepiece_metadata(), cache=folder)
    for text in TEXTS:
        assert cached.encode(text) == built.encode(text) == SENTENCEPIECE.encode(text)
    for damage in (file.read_bytes()[:-9], file.read_bytes().replace(b"octa", b"atco"), b"", b"{}", b"\xff\n\xff"):
        file.write_bytes(damage)
        again = Tokenizer.from_gguf(sentencepiece_metadata(), cache=folder)
        assert again.encode("octavo") == built.encode("octavo")
        assert file.read_bytes() != damage
    assert list(folder.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(), cache=blocker / "cache")
    assert tokenizer.encode("octavo") == SENTENCEPIECE.encode("octavo")


# --- Hugging Face -------------------------------------------------------------------------------------------------------


def test_hf_facts() -> None:
    assert HF.adds_bos
    assert HF.token_text(HF.eos_token_ids[0]) == "</s>"
    assert set(HF.special_tokens) == set(CONTROLS)
    assert encoded(HF, "hello<|im_end|><think>") == [b"<s>", b"hello", b"<|im_end|>", b"<think>"]
    assert encoded(HF, "<s>hello") == [b"<s>", b"hello"]


@pytest.mark.parametrize("pattern", [None, "QWEN2", "LLAMA3"])
def test_hf_ids_are_the_librarys(pattern: str | None) -> None:
    data = hf_byte_level(pattern=None if pattern is None else getattr(pretokenizers, pattern), nfc=pattern == "QWEN2")
    tokenizer, backend = Tokenizer.from_hf(data, {"bos_token": "<s>"}, {}, {}), Backend.from_str(data.decode())
    for text in [*TEXTS, "hello <|im_end|>\n<tool_call>{}</tool_call>"]:
        assert tokenizer.encode(text) == backend.encode(text).ids
        ids = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)


def test_hf_sentencepiece() -> None:
    tokenizer = Tokenizer.from_hf(hf_sentencepiece(), {"bos_token": "<s>", "add_bos_token": True}, {}, {})
    assert tokenizer.adds_bos
    assert tokenizer.max_token_characters == SENTENCEPIECE.max_token_characters
    for item in sentencepiece_golden()["items"]:
        assert tokenizer.encode(item["text"], add_special_tokens=False) == item["ids"]
        assert tokenizer.decode(item["ids"], skip_special_tokens=True) == item["decoded"]


@pytest.mark.parametrize(
    ("by_processor", "flag", "adds"), [(True, None, True), (True, False, False), (False, True, True)]
)
def test_hf_flag_overrides_the_post_processor(by_processor: bool, flag: bool | None, adds: bool) -> None:
    tokenizer = Tokenizer.from_hf(
        hf_byte_level(bos_by_processor=by_processor), {"bos_token": "<s>", "add_bos_token": flag}, {}, {}
    )
    assert tokenizer.adds_bos is adds
    assert (tokenizer.encode("hello")[0] == tokenizer.bos_token_id) is adds


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [270, 269]}, {"eos_token_id": 5}, [268, 270, 269]),
        ({}, {"eos_token_id": 5}, [268, 5]),
        ({"eos_token_id": 268}, {}, [268]),
    ],
)
def test_hf_end_tokens(generation: dict[str, Any], config: dict[str, Any], expected: list[int]) -> None:
    assert HF.special_tokens["</s>"] == 268
    tokenizer = Tokenizer.from_hf(hf_byte_level(), {"eos_token": "</s>"}, generation, config)
    assert list(tokenizer.eos_token_ids) == expected


def test_hf_ids_with_gaps_keep_their_numbers() -> None:
    """The library numbers added tokens as they come; a file may number them otherwise."""
    description = json.loads(hf_byte_level())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] != "<|im_start|>"]
    data = json.dumps(description).encode()
    tokenizer, backend = Tokenizer.from_hf(data, {}, {}, {}), Backend.from_str(data.decode())
    ids = backend.encode("<|im_end|>hello<think>", add_special_tokens=False).ids
    assert tokenizer.encode("<|im_end|>hello<think>", add_special_tokens=False) == ids
    marked = tokenizer.control_guard.protect("</s>") + "<|im_end|>hello<think>"
    assert tokenizer.encode_chat(marked, marked=True)[-3:] == ids
    plain = tokenizer.encode("<|im_end|><think>", add_special_tokens=False, parse_special=False)
    assert plain[-1] == ids[-1]
    assert tokenizer.decode(plain, skip_special_tokens=True) == "<|im_end|><think>"


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"model": 7}'])
def test_damaged_hf_files_are_refused(data: bytes) -> None:
    with pytest.raises(ModelFileError):
        Tokenizer.from_hf(data, {}, {}, {})


def test_unknown_hf_decoders_are_refused_by_name() -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer.from_hf(backend.to_str().encode(), {}, {}, {})


# --- cost ---------------------------------------------------------------------------------------------------------------


def test_a_token_bound_lets_long_text_be_refused_unread() -> None:
    assert BYTE_LEVEL.max_token_characters == max(map(len, [*CONTROLS, *USER_DEFINED_TOKENS]))
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE, HF):
        for text in [*TEXTS, "x" * 1000, " " * 1000, "é" * 100, "<|im_end|>" * 10]:
            assert len(text) <= len(tokenizer.encode(text)) * tokenizer.max_token_characters
    without_bytes = [
        token if not re.match("<0x", token) else f"[{token}]" for token in sentencepiece_golden()["tokens"]
    ]
    types = [1 if kind == 6 else kind for kind in sentencepiece_golden()["token_type"]]
    unknowing = Tokenizer.from_gguf(sentencepiece_metadata(tokens=without_bytes, token_type=types))
    assert unknowing.max_token_characters == UNBOUNDED


@pytest.mark.parametrize("unit", ["hello world ", "<|im_end|>", "a", " ", "<", "é"])
def test_time_is_linear_in_length(unit: str, smollm2_tokenizer: Tokenizer) -> None:
    """O-42: ten times the text takes about ten times as long, whatever is repeated."""

    def cpu_s(characters: int) -> float:
        text = unit * (characters // len(unit))
        start = time.process_time()
        smollm2_tokenizer.encode(text)
        return time.process_time() - start

    cpu_s(10_000)
    assert cpu_s(300_000) < 40 * max(cpu_s(30_000), 0.005)


def test_other_threads_run_while_a_long_text_is_encoded(smollm2_tokenizer: Tokenizer) -> None:
    """O-42: the event loop shares the interpreter with threads that tokenize."""
    done = threading.Event()
    turns = 0

    def loop() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=loop)
    thread.start()
    start = time.perf_counter()
    smollm2_tokenizer.encode(" " * 1_000_000)
    elapsed_s = time.perf_counter() - start
    done.set()
    thread.join()
    assert turns > 20 * elapsed_s


def test_threads_share_a_tokenizer() -> None:
    texts = [f"hello world {index} <|im_end|> <think>" for index in range(200)]
    alone = [BYTE_LEVEL.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(BYTE_LEVEL.encode, texts)) == alone


def test_metadata_is_not_changed() -> None:
    metadata, before = byte_level_metadata(), byte_level_metadata()
    Tokenizer.from_gguf(metadata)
    assert metadata == before
