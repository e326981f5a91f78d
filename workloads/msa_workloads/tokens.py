"""Tokenizers: bytes as tokens, or a Hugging Face tokenizer, behind one small interface."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from msa_workloads.sources import DataError

BOS, EOS, PAD = 256, 257, 258
BYTE_VOCABULARY = 260
"""256 bytes, three special tokens and one spare: a multiple of four suits matrix shapes."""


class Tokenizer(Protocol):
    """Turns a document into ids; every document gets ``bos`` (if any) before and ``eos`` after."""

    name: str
    vocabulary: int
    pad: int

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of a whole document, special tokens included, int32 of shape (tokens,)."""
        ...

    def count(self, text_bytes: int) -> int | None:
        """Tokens of a document of that many bytes, or None when only encoding can tell."""
        ...


class ByteTokenizer:
    """One token per byte: no vocabulary to learn, no text that cannot be encoded."""

    name = "bytes"
    vocabulary = BYTE_VOCABULARY
    pad = PAD

    def encode(self, text: bytes) -> np.ndarray:
        ids = np.empty(len(text) + 2, dtype=np.int32)
        ids[0], ids[-1] = BOS, EOS
        ids[1:-1] = np.frombuffer(text, dtype=np.uint8)
        return ids

    def count(self, text_bytes: int) -> int | None:
        return text_bytes + 2


PROBE = "A text of 5 words."


class HubTokenizer:
    """A Hugging Face tokenizer from a local folder or the hub.

    Raises :class:`DataError` when it cannot be loaded, has no end-of-sequence token, or makes
    nothing of text.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise DataError(f"tokenizer {name!r} cannot be loaded: {first_line}") from None
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"tokenizer {name!r} has no end-of-sequence token, which separates documents"
            )
        # Of a folder that holds a model alone transformers makes a tokenizer without a vocabulary.
        if not tokenizer(PROBE, add_special_tokens=False)["input_ids"]:
            raise DataError(
                f"tokenizer {name!r} makes no tokens of text: its files are missing; name one in "
                "model.tokenizer, or bytes"
            )
        self.name = name
        # Ids may leave gaps: what counts is the largest, not how many there are.
        self.vocabulary = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
        self.pad = (
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )
        self._tokenizer = tokenizer

    def encode(self, text: bytes) -> np.ndarray:
        # Undecodable bytes become U+FFFD: one bad file must not end a run over a corpus.
        ids = self._tokenizer(
            text.decode("utf-8", errors="replace"), add_special_tokens=False, verbose=False
        )["input_ids"]
        bos = self._tokenizer.bos_token_id
        start = [] if bos is None else [bos]
        return np.array([*start, *ids, self._tokenizer.eos_token_id], dtype=np.int32)

    def count(self, text_bytes: int) -> int | None:
        del text_bytes
        return None


def open_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or a Hugging Face name or folder."""
    return ByteTokenizer() if name == "bytes" else HubTokenizer(name.removeprefix("hf://"))
