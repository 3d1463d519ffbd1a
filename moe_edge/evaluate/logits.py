"""Teacher-forced logits of given tokens, written to a file row by row."""

import zipfile
from pathlib import Path

import numpy as np

from moe_edge.core import processes
from moe_edge.core.checks import CapacityError, OutputError, RequestError
from moe_edge.core.npy import load_npy
from moe_edge.evaluate.likelihood import LOGITS_BYTES


def read_tokens(path: str | Path) -> np.ndarray:
    """Token ids `[B, S]` of a .npy file; never unpickles.

    Raises:
      RequestError: another kind of file or array.
      OSError: the file cannot be read.
    """
    try:
        # Mapped, so that a header that claims more than the file holds is refused
        # before memory is asked for.
        tokens = load_npy(path, mmap_mode="r")
    except (ValueError, EOFError, OverflowError) as error:
        raise RequestError(f"{path} is no .npy file of integers: {error}") from error
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu":
        kind = getattr(tokens, "dtype", type(tokens).__name__)
        raise RequestError(f"{path} holds {kind}, expected one integer array")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise RequestError(f"{path} has shape {tokens.shape}, expected [B, S]")
    return tokens


def check_logits_path(path: str | Path, overwrite: bool) -> Path:
    """Raises OutputError if the file exists (without `overwrite`) or is no .npz."""
    path = Path(path)
    if path.suffix != ".npz":
        raise OutputError(f"logits file {path} must end in .npz")
    if not processes.writes():
        return path
    if path.exists() and not overwrite:
        raise OutputError(f"logits file {path} exists; add --overwrite or name another")
    if not path.parent.is_dir():
        raise OutputError(f"folder {path.parent} of the logits file does not exist")
    return path


def rows_together(shape_BS: tuple[int, int], vocab_size: int) -> int:
    """How many of B rows of S tokens run at once."""
    B, S = shape_BS
    return min(B, max(1, LOGITS_BYTES // (4 * S * vocab_size)))


def write_logits(engine, tokens_BS: np.ndarray, path: Path) -> tuple[int, int, int]:
    """Writes `logits`, float32 `[B, S, V]`, as an .npz file.

    At most `LOGITS_BYTES` of logits, or one chunk of one row, are in memory: rows run
    in groups and a group is written as soon as it is known. Of several processes all
    compute, and the first one writes.

    Raises:
      CapacityError: rows longer than the model's context.
    """
    B, S = tokens_BS.shape
    V, limit = engine.config.vocab_size, engine.config.max_positions
    if S > limit:
        raise CapacityError(
            f"rows of {S} tokens exceed the model's context of "
            f"{engine.config.context_words}; cut them"
        )
    if not processes.writes():
        for _ in _blocks(engine, tokens_BS):
            pass
        return B, S, V
    partial = path.with_name(f".{path.name}.partial")
    try:
        with (
            zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as file,
            file.open("logits.npy", "w", force_zip64=True) as out,
        ):
            header = {"descr": "<f4", "fortran_order": False, "shape": (B, S, V)}
            np.lib.format.write_array_header_2_0(out, header)
            for block in _blocks(engine, tokens_BS):
                out.write(block.tobytes())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return B, S, V


def _blocks(engine, tokens_BS: np.ndarray):
    """Logits of all rows in the order of the file."""
    group = rows_together(tokens_BS.shape, engine.config.vocab_size)
    for first in range(0, len(tokens_BS), group):
        yield from _row_blocks(engine, tokens_BS[first : first + group].tolist())


def _row_blocks(engine, rows: list[list[int]]):
    """Logits of a group in the order of the file: all of row 0, then row 1, ..."""
    S, chunks = len(rows[0]), []
    for start, logits in engine.score(rows):
        chunk = np.asarray(logits)[:, : S - start].astype("<f4", copy=False)
        if len(rows) == 1:  # its chunks are in order already
            yield chunk[0]
        else:
            chunks.append(chunk)
    for row in range(len(rows)) if chunks else ():
        for chunk in chunks:
            yield chunk[row]
