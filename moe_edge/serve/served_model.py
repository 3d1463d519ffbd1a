"""The model that is served, as clients see it and requests are checked against."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.checkpoint.manifest import REPORT_NAME
from moe_edge.convert.tokenizer import Tokenizer, load_tokenizer
from moe_edge.core.checks import CheckpointError
from moe_edge.core.json_reader import read_json
from moe_edge.serve.errors import ApiError
from moe_edge.serve.grammar import Grammars


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model behind the server.

    Attributes:
      id: that requests name.
      own_k: experts (or sub-experts) a token; requests may allow fewer.
      default_floor: least K of requests that say nothing.
      max_context: tokens of a prompt and what follows.
      eos_ids: tokens that end a text.
      lossless: whether it computes what the checkpoint says.
      perplexities: K -> perplexity, as measured; None: nothing was.
      created: when it was ready, in seconds since 1970.
      grammars: makes answers follow a grammar.
      longest_text: bytes of a text that could have `max_context` tokens; None: any.
    """

    id: str
    tokenizer: Tokenizer
    vocab_size: int
    grammars: Grammars
    own_k: int
    default_floor: int
    max_context: int
    eos_ids: Sequence[int] = ()
    lossless: bool = True
    perplexities: Mapping[int, float] | None = None
    created: int = 0
    longest_text: int | None = None

    def check_id(self, name: str, value: Any) -> str:
        """A reader (`fields.py`) of the field `model`."""
        if value != self.id:
            raise ApiError(
                "model_not_found",
                f"there is no model {value!r:.60}; this server has {self.id!r}",
                param=name,
            )
        return value

    def entry(self) -> dict[str, Any]:
        """Its entry of /v1/models."""
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "moe_edge",
            "moe_edge": {
                "k": self.own_k,
                "max_context": self.max_context,
                "vocab_size": self.vocab_size,
                "lossless": self.lossless,
            },
        }

    def listing(self) -> dict[str, Any]:
        """The body of /v1/models."""
        return {"object": "list", "data": [self.entry()]}


def make_served_model(
    name: str,
    reader,
    *,
    max_context: int,
    default_floor: int | None = None,
    lossless: bool = True,
) -> ServedModel:
    """An open checkpoint as clients see it, by the name that it was given here.

    Args:
      default_floor: None: the model's own K.
    Raises:
      CheckpointError: a tokenizer or report that cannot be read.
    """
    config, own_k = reader.config, reader.config.moe.top_k
    tokenizer = load_tokenizer(reader)
    longest = tokenizer.longest()
    return ServedModel(
        id=name,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        own_k=own_k,
        default_floor=own_k if default_floor is None else default_floor,
        max_context=max_context,
        eos_ids=config.eos_ids,
        lossless=lossless,
        perplexities=read_perplexities(Path(reader.path)),
        created=int(time.time()),
        longest_text=None if longest is None else longest * max_context,
        grammars=Grammars(tokenizer, config.vocab_size, config.eos_ids),
    )


def read_perplexities(folder: Path) -> dict[int, float] | None:
    """Perplexity by K of a refactored checkpoint's report; None if there is no report.

    A perplexity that was too large for a number is infinite.

    Raises:
      CheckpointError: a report of another form.
    """
    path = folder / REPORT_NAME
    if not path.is_file():
        return None
    report = read_json(path, CheckpointError)
    by_k = report.get("ppl_by_k") if isinstance(report, dict) else None
    try:
        found = {int(k): math.inf if v is None else float(v) for k, v in by_k.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: ppl_by_k is {by_k!r:.60}, expected K and perplexity"
        ) from error
    if any(k < 1 or not ppl >= 1 for k, ppl in found.items()):
        raise CheckpointError(
            f"{path}: ppl_by_k is {by_k!r:.60}, expected a K from 1 and 1 or more each"
        )
    return found
