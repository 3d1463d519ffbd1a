"""The tokenizer of a checkpoint, through the `tokenizers` library."""

from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from moe_edge.core.checks import CheckpointError
from moe_edge.model.config import ModelConfig


class Tokenizer:
    """Text <-> ids.

    Attributes:
      vocab_size: number of ids the tokenizer knows.
    """

    def __init__(self, path: Path, config: ModelConfig):
        try:
            self._tokenizer = _Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"cannot read tokenizer {path}: {error}") from error
        # Files may ask for padding and truncation; neither is wanted here.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = self._tokenizer.get_vocab_size()
        if self.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"tokenizer {path} has {self.vocab_size} tokens, the vocabulary of "
                f"the model only {config.vocab_size}; use the tokenizer of this model"
            )

    def encode(self, text: str) -> list[int]:
        """Ids of a text; begin-of-text only if the tokenizer itself adds it."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def load_tokenizer(reader) -> Tokenizer:
    """The tokenizer of an open checkpoint.

    Raises:
      CheckpointError: the checkpoint has none, or it cannot be read.
    """
    path = reader.tokenizer_path
    if path is None:
        raise CheckpointError(
            f"{reader.path} has no tokenizer.json; put the model's tokenizer.json there"
        )
    return Tokenizer(path, reader.config)
