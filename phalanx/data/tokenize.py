"""Text to token ids and back. `dataset` chooses a tokenizer by name; sampling from a trained model decodes with it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import RunError


class ByteTokenizer:
    """One token per UTF-8 byte, and one that ends a document: any file is text, and no vocabulary has to be fetched."""

    vocab = 257
    end = 256

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of `ids`. Only bytes can be shown: the end token, and ids a padded vocabulary adds, are dropped."""
        tokens = np.asarray(ids, dtype=np.int64).ravel()
        shown = tokens[(tokens >= 0) & (tokens < self.end)]
        return shown.astype(np.uint8).tobytes().decode(errors="replace")


def tokenizer(name: str) -> ByteTokenizer:
    if name != "byte":
        raise RunError([f'data.tokenizer = "{name}" is not known; the only tokenizer is "byte".'])
    return ByteTokenizer()
