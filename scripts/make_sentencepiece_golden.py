"""Writes tests/golden/sentencepiece-tiny.json: a tiny SentencePiece BPE vocabulary and SentencePiece's own encodings of some texts.

Needs `pip install sentencepiece==0.2.3 protobuf`, which octavo itself does not.
Run as: python scripts/make_sentencepiece_golden.py tests/golden/sentencepiece-tiny.json
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

CORPUS = [
    "The octavo is a sheet folded into eight leaves, that is sixteen pages.",
    "A quarto has four leaves and a folio has two; the sheet is the same.",
    "    def fold(sheet):\n        return [sheet] * 8",
    "Printers fold the sheets, gather the leaves and sew the pages.",
    "Le livre in-octavo est plus petit que l'in-quarto, naïve façade.",
    "1450 1455 1500 1501 books, sheets, leaves, pages, folds",
    "the theory of the thing that then there these those",
] * 20

TEXTS = [
    "",
    " ",
    "   ",
    "octavo",
    " octavo",
    "  two spaces first",
    "The sheets are folded, sewn and bound.",
    "trailing space ",
    "a  b   c    d",
    "tabs\tand\nlines\r\n\n",
    "naïve façade, été",
    "emoji 👩‍👩‍👧 and 漢字 and \u0000",
    "thethethethethe",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "unseen: ßøþ Ω ∑",
    "sheets-and-leaves_and.pages(eight)==16",
    "▁ written out ▁▁",
]


def main(output: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    golden = {
        "made_with": f"sentencepiece {sentencepiece.__version__}, BPE, byte fallback, as Llama 2's settings",
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "token_type": [piece.type for piece in proto.pieces],
        "items": [
            {"text": text, "ids": (ids := processor.encode(text)), "decoded": processor.decode(ids)} for text in TEXTS
        ],
    }
    output.write_text(json.dumps(golden, ensure_ascii=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
