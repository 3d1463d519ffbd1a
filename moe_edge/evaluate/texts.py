"""Text to evaluate on: a file, or a data set read through `datasets`."""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.core.files import check_there, decode_utf8

# File ending -> builder of `datasets`.
BUILDERS = {
    ".txt": "text",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}
ROW_SEPARATOR = "\n\n"  # between rows of a data set


def find_path(path: str, data_dir: str | None) -> str:
    """`path` as given if it exists, else below `data_dir` if it exists there."""
    if data_dir and not os.path.exists(path):
        below = os.path.join(data_dir, path)
        if os.path.exists(below):
            return below
    return path


def find_file(path: str, data_dir: str | None, flag: str = "") -> str:
    """`find_path` of a file that must be there; `flag` named it, for the message.

    Raises:
      FileNotFoundError, IsADirectoryError: it is in neither place, or a folder.
    """
    found = find_path(path, data_dir)
    if os.path.isabs(path) or os.path.exists(found):
        check_there(found, flag)
        return found
    where = f"nor in {data_dir}" if data_dir else "and no --data_dir was given"
    named = f"{flag} {path}".lstrip()
    raise FileNotFoundError(
        f"{named} is not here {where}; name the folder of the data: --data_dir"
    )


def sha256_of(path: str | Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def spread_rows(ids: Sequence[int], rows: int, *parts: int) -> list[Sequence[int]]:
    """Rows spread evenly over a text, without overlap.

    Args:
      parts: tokens of a row, which add up.
    Raises:
      RequestError: the text is too short.
    """
    size, words = sum(parts), " + ".join(map(str, parts))
    if len(ids) < rows * size:
        raise RequestError(
            f"the text has {len(ids)} tokens; {rows} rows of {words} need "
            f"{rows * size}: ask for fewer or give a longer text"
        )
    starts = [(len(ids) - size) * i // max(1, rows - 1) for i in range(rows)]
    return [ids[start : start + size] for start in starts]


def read_text(path: str | Path) -> str:
    """A UTF-8 file.

    Raises:
      RequestError: not UTF-8, or empty.
      OSError: it cannot be read.
    """
    check_there(path, "text")
    text = decode_utf8(path, Path(path).read_bytes())
    if not text.strip():
        raise RequestError(f"{path} is empty; expected some text")
    return text


def read_dataset(
    name: str, *, split: str, column: str, config: str | None, limit: int | None
) -> str:
    """Rows of a data set's text column, joined by an empty line.

    Args:
      name: a folder of `save_to_disk`, a local file (text, JSON lines, Parquet, CSV),
        or a name on the Hugging Face hub.
      split: of a data set with several.
      column: which column holds the text.
      config: the hub's configuration name.
      limit: at most so many rows.
    Raises:
      ConfigError: nothing of that name, no such split or column.
      RequestError: no text in it.
    """
    rows = _open_dataset(name, split, config)
    columns = rows.column_names
    if columns is not None and column not in columns:
        raise ConfigError(
            f"data set {name} has no column {column!r}; known: {', '.join(columns)}"
        )
    texts = []
    for row in _rows_of(name, rows):
        if limit is not None and len(texts) == limit:
            break
        if not isinstance(row.get(column), str):
            raise RequestError(
                f"data set {name}, row {len(texts)}: {column!r} is "
                f"{row.get(column)!r}, expected a text"
            )
        texts.append(row[column])
    text = ROW_SEPARATOR.join(texts)
    if not text.strip():
        raise RequestError(f"data set {name} holds no text in column {column!r}")
    return text


def _rows_of(name: str, rows):
    """The rows; a file is parsed, and may turn out broken, while they are read."""
    try:
        yield from rows
    except Exception as error:  # of pyarrow, pandas or datasets, by the format
        raise RequestError(
            f"data set {name} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _open_dataset(name: str, split: str, config: str | None):
    import datasets  # here: importing it takes a second

    path = Path(name)
    if path.is_dir():
        try:
            loaded = datasets.load_from_disk(str(path))
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(
                f"{name} is no data set of `save_to_disk`: {error}"
            ) from error
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if split not in loaded:
            raise ConfigError(
                f"data set {name} has no split {split!r}; known: {', '.join(loaded)}"
            )
        return loaded[split]
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise ConfigError(
                f"{name} ends in {path.suffix!r}; known: {', '.join(BUILDERS)}"
            )
        # Streaming reads the file itself and leaves no copy in a cache.
        return datasets.load_dataset(
            BUILDERS[path.suffix], data_files=name, split="train", streaming=True
        )
    if path.suffix in BUILDERS or name.startswith((".", "/", "~")):
        raise ConfigError(f"data set file {name} does not exist; check the path")
    # Without a network the hub's client retries for half a minute: no word of each.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # many types: no network, no such name, no such split
        raise ConfigError(
            f"data set {name!r} is no local file or folder, and the hub gave: "
            f"{type(error).__name__}: {error}"
        ) from error
