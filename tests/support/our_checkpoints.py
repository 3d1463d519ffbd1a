"""Checkpoints of our own format: converted, refactored by every gate, quantised."""

from pathlib import Path

from moe_edge.model.config_checks import GATES
from tests.support.conversion import convert
from tests.support.refactored import write_random
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_checkpoints import hf_folder

# Records of blocks of 32 weights, and the ids of the tokenizer.
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 320}
OURS = ("converted", *GATES, "q8_0")


def write_ours(folder: Path, kind: str) -> Path:
    """A tiny checkpoint of one of `OURS`, with a tokenizer, in a new folder."""
    parent = hf_folder(folder / "parent", "qwen2_moe", **WIDE)
    tiny_tokenizer().save(str(parent / "tokenizer.json"))
    if kind in GATES:
        return write_random(parent, folder / "ours", kind)
    dtype = None if kind == "converted" else kind
    convert(parent, folder / "ours", expert_dtype=dtype)
    return folder / "ours"
