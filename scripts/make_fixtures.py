"""Makes the tiny random-weight models of tests/golden/tiny-*, with logits of Hugging Face transformers as the truth.

Run by hand, in an environment of its own, when a family is added; the test suite needs neither torch nor transformers:

    python -m venv fixtures && fixtures/bin/pip install torch==2.13.0 transformers==5.24.0 numpy safetensors
    fixtures/bin/python scripts/make_fixtures.py

Each folder is a Hugging Face checkpoint with a byte-level tokenizer, and reference.npz: `prompt_ids` [T] and `logits` [T, vocab]
of float32 math on the stored weights. The windows are smaller than the prompt, so that they matter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL)
PROMPT_LEN = 48
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[PretrainedConfig, torch.dtype]] = {
    "tiny-llama": (LlamaConfig(**COMMON, tie_word_embeddings=True), torch.bfloat16),
    "tiny-llama3": (
        LlamaConfig(
            **COMMON,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        torch.float32,
    ),
    "tiny-mistral": (MistralConfig(**COMMON, sliding_window=16), torch.bfloat16),
    "tiny-qwen2": (
        Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        torch.bfloat16,
    ),
}


def make_tokenizer() -> Tokenizer:
    """Special tokens 0..2, then one token per byte."""
    vocab = {token: index for index, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def make_model(name: str, config: PretrainedConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(sum(name.encode()))
    folder = GOLDEN / name
    model = AutoModelForCausalLM.from_config(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases would otherwise all be ones and zeros, and hide mistakes
            offset = 1.0 if "norm" in parameter_name else 0.0
            parameter.data = offset + 0.2 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}, indent=2) + "\n"
    )

    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompt_ids = np.random.default_rng(len(name)).integers(len(SPECIAL), VOCAB_SIZE, PROMPT_LEN, dtype=np.int32)
    with torch.no_grad():
        logits = stored(torch.tensor(prompt_ids[np.newaxis].astype(np.int64))).logits[0].numpy()
    np.savez_compressed(folder / "reference.npz", prompt_ids=prompt_ids, logits=logits)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder.name}: {size / 1000:.0f} kB, logits {logits.min():.2f} .. {logits.max():.2f}")


if __name__ == "__main__":
    names = sys.argv[1:] or list(MODELS)
    for model_name in names:
        make_model(model_name, *MODELS[model_name])
