"""Models made up of random weights: readable by others, usable here, sensible in their numbers."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.bench.local.random_weights import random_matrix, random_rows
from octavo.bench.local.synthesize import FORMATS, Shape, byte_level_tokenizer, synthesize
from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.frontend.llm import LLM
from octavo.frontend.params import SamplingParams
from octavo.loaders.checkpoint import open_checkpoint
from octavo.quant import Format, RawTensor, dequantize
from octavo.runner.load import read_spec

TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=700, context=256)


@pytest.mark.parametrize("form", FORMATS)
def test_generates_finite_text(tmp_path: Path, form: Format) -> None:
    synthesize(tmp_path / "m.gguf", TINY, form=form)
    with LLM(str(tmp_path / "m.gguf"), backend="numpy", kv_cache_memory="8M") as llm:
        (output,) = llm.generate(
            "the other day",
            SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0),
            use_tqdm=False,
        )
    (choice,) = output.outputs
    assert len(choice.token_ids) == 8
    assert choice.text
    assert choice.logprobs is not None
    assert all(math.isfinite(entry.logprob) for position in choice.logprobs for entry in position.values())


def test_native_backend_computes_what_the_reference_does(tmp_path: Path) -> None:
    synthesize(tmp_path / "m.gguf", TINY, form=Format.Q8_0)
    texts = []
    for backend in ("cpu", "numpy"):
        with LLM(str(tmp_path / "m.gguf"), backend=backend, kv_cache_memory="8M", threads=None) as llm:
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            texts.append(llm.generate("time and again", params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("form", FORMATS)
def test_the_gguf_package_reads_the_file(tmp_path: Path, form: Format) -> None:
    parameters = synthesize(tmp_path / "m.gguf", TINY, form=form)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert sum(int(np.prod(tensor.shape)) for tensor in tensors.values()) == parameters
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name.lower() == form
    (file_type,) = reader.fields["general.file_type"].parts[reader.fields["general.file_type"].data[0]]
    assert gguf.LlamaFileType(file_type).name.lower().removeprefix("mostly_") == form
    assert tensors["token_embd.weight"].tensor_type.name.lower() == ("q8_0" if form.value.startswith("q4") else form)
    values = gguf.dequantize(tensors["blk.0.ffn_up.weight"].data, tensors["blk.0.ffn_up.weight"].tensor_type)
    assert values.shape == (96, 64)
    assert np.isfinite(values).all()
    # llama.cpp takes nothing else.
    assert reader.fields["tokenizer.ggml.token_type"].types[-1] is gguf.GGUFValueType.INT32


@pytest.mark.parametrize("form", [*FORMATS, Format.F32])
def test_weights_have_mean_zero_and_the_deviation_of_a_normalized_layer(form: Format) -> None:
    weights = dequantize(RawTensor("w", (512, 1024), form, random_matrix(form, 512, 1024, seed=(1,))))
    assert abs(weights.mean()) < 0.01 * weights.std()
    assert 0.7 < weights.std() * math.sqrt(1024) < 1.5
    assert np.unique(weights).size >= 15


def test_chunks_do_not_change_with_the_way_they_are_read() -> None:
    whole = random_matrix(Format.Q4_0, 30_000, 1024, seed=(7, 1))
    chunks = list(random_rows(Format.Q4_0, 30_000, 1024, seed=(7, 1)))
    assert len(chunks) > 1
    assert np.array_equal(whole, np.concatenate(chunks))
    assert not np.array_equal(whole, random_matrix(Format.Q4_0, 30_000, 1024, seed=(7, 2)))


def test_equal_arguments_give_equal_files(tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = tmp_path / name
        folder.mkdir()
        synthesize(folder / "m.gguf", TINY, seed=seed)
        files.append((folder / "m.gguf").read_bytes())
    assert files[0] == files[1] != files[2]


def test_like_takes_sizes_and_tokenizer_of_another_model(tmp_path: Path, smollm2: Path) -> None:
    shape = Shape(layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=64, context=512, vocab=49200)
    synthesize(tmp_path / "m.gguf", shape, like=str(smollm2))
    spec = read_spec(open_checkpoint(str(tmp_path / "m.gguf")))
    original = read_spec(open_checkpoint(str(smollm2)))
    assert (spec.num_layers, spec.vocab_size, spec.max_context) == (1, 49200, 512)
    assert spec.norm_eps == original.norm_eps
    assert spec.rope.inverse_frequencies[1] == pytest.approx(original.rope.inverse_frequencies[2])
    with LLM(str(tmp_path / "m.gguf"), kv_cache_memory="8M") as made, LLM(str(smollm2), kv_cache_memory="256M") as real:
        text = "Continuous batching, 16 streams."
        assert made.get_tokenizer().encode(text) == real.get_tokenizer().encode(text)


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    synthesize(tmp_path / "m.gguf", TINY, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": None, "kv_heads": None}, "--layers, --kv-heads"),
        ({"hidden": 80}, "multiple of 32"),
        ({"kv_heads": 3}, "multiple of --kv-heads"),
        ({"vocab": 200}, "at least 260"),
        ({"layers": 0}, "--layers is 0"),
        ({"head_dim": 33, "heads": 32, "kv_heads": 1}, "even"),
    ],
)
def test_refuses_sizes_that_do_not_fit(tmp_path: Path, change: dict[str, int | None], message: str) -> None:
    sizes = {name: getattr(TINY, name) for name in TINY.__struct_fields__} | change
    with pytest.raises(ConfigError, match=message):
        synthesize(tmp_path / "m.gguf", Shape(**sizes))
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        synthesize(tmp_path / "m.gguf", TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 1 --hidden 32 --heads 1 --kv-heads 1 --head-dim 32 --ffn 64 --vocab 300 --context 64".split()
    out = tmp_path / "made.gguf"
    assert main(["bench", "synthesize", str(out), *sizes, "--format", "bf16", "--seed", "3"]) == 0
    assert "million parameters" in capsys.readouterr().out
    assert open_checkpoint(str(out)).name == "made"
    assert main(["bench", "synthesize", str(out), *sizes]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["bench", "synthesize", str(out), *sizes, "--force"]) == 0
    assert main(["bench", "synthesize", str(tmp_path / "made.bin"), *sizes]) == 2
    assert main(["bench", "synthesize", str(tmp_path / "other.gguf"), "--seed", "-1", *sizes]) == 2


@pytest.mark.parametrize("vocab", [260, 700, 1000, 49152])
def test_byte_level_tokens_are_unique(vocab: int) -> None:
    metadata = byte_level_tokenizer(vocab)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == len(metadata["tokenizer.ggml.token_type"]) == vocab
    assert metadata["tokenizer.ggml.merges"]
