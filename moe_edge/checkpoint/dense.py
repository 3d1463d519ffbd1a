"""dense/: every weight that is not a routed expert, in Orbax's format.

One Orbax item per layer and two for the top (schema.py), each a flat dict of arrays,
so that a checkpoint is written and read piece by piece. A matrix in blocks
(`quantised.Matrix`) is stored as its rows of bytes, whose shape tells its kind.

Orbax writes the items, TensorStore reads them. A restore by Orbax starts JAX's backend
and waits for all processes of `jax.distributed`; each process of a cluster reads its
checkpoint alone, some before JAX starts.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moe_edge.checkpoint.schema import Item, Shapes, check_tensors
from moe_edge.core.checks import CheckpointError
from moe_edge.core.files import check_room
from moe_edge.model.quantised import Matrix, as_stored, kind_of

DENSE_FOLDER = "dense"


# Arrays are stored in chunks of this size, so that neither writing nor reading one
# needs a second copy of it.
_CHUNK_BYTES = 8 << 20
_ROOM_BYTES = 1 << 20  # of Orbax's own files
_ZARR = "zarr.json"  # beside the chunks of each array


def item_path(folder: Path, item: Item) -> Path:
    """Folder of an item."""
    name = item if isinstance(item, str) else f"layer_{item:03d}"
    return folder / DENSE_FOLDER / name


def _checkpointer():
    # Imported here: Orbax takes a second, and reading does not need it.
    import jax
    import orbax.checkpoint as ocp

    # Saving is synchronous, so nothing changes an array while it is written.
    arrays = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    handler = ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        use_compression=False,  # weights hardly compress
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, arrays), (jax.Array, ocp.type_handlers.ArrayHandler())
        ),
    )
    return ocp.Checkpointer(handler)


@contextlib.contextmanager
def orbax_writes(folder: Path, num_bytes: int) -> Iterator[None]:
    """Orbax saves inside: whatever it raises becomes an OSError.

    Room is asked for before: where a write fails, others that Orbax has begun report to
    an event loop that is gone, and each prints a traceback.

    Raises:
      OSError: less than `num_bytes` are free at `folder`, or the save failed.
    """
    check_room(folder, num_bytes + _ROOM_BYTES)
    try:
        yield
    except Exception as error:  # of many kinds
        if isinstance(error, OSError):
            raise
        raise OSError(f"{folder}: {_first_line(error)}") from error


class DenseWriter:
    """Writes the items of one checkpoint folder."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self._orbax = _checkpointer()

    def save(self, item: Item, arrays: dict[str, np.ndarray | Matrix]) -> None:
        """Writes one item.

        Raises:
          OSError: the disk is full, or cannot be written.
        """
        import orbax.checkpoint as ocp

        chunked = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
        # A plain ndarray: Orbax does not know its subclass memmap.
        plain = {name: np.asarray(as_stored(array)) for name, array in arrays.items()}
        path = item_path(self.folder, item)
        with orbax_writes(self.folder, sum(array.nbytes for array in plain.values())):
            self._orbax.save(path, args=ocp.args.PyTreeSave(plain, save_args=chunked))


def stored_dtypes(
    folder: Path, item: Item, expected: Shapes
) -> dict[str, np.dtype | str]:
    """Name -> dtype of one item, or its kind of blocks; names and shapes are checked.

    Raises:
      CheckpointError: missing or damaged, or tensors missing, extra or misshapen.
    """
    opened, kinds = _open_item(folder, item, expected)
    dtypes = {name: array.dtype.numpy_dtype for name, array in opened.items()}
    return dtypes | kinds


def read_item(
    folder: Path, item: Item, expected: Shapes
) -> dict[str, np.ndarray | Matrix]:
    """Reads one item as numpy arrays, checked as by `stored_dtypes`."""
    opened, kinds = _open_item(folder, item, expected)
    reads = {name: array.read() for name, array in opened.items()}
    arrays = _results(item_path(folder, item), reads)
    return arrays | {name: Matrix(kind, arrays[name]) for name, kind in kinds.items()}


def _open_item(folder: Path, item: Item, expected: Shapes) -> tuple[dict, dict]:
    """Name -> `tensorstore.TensorStore`, of the names and shapes expected; name -> kind
    of those in blocks."""
    import tensorstore

    path = item_path(folder, item)
    if not path.is_dir():
        raise CheckpointError(f"{path} is missing; convert the model again")
    base = {"driver": "file", "path": f"{path}/"}
    database = {"driver": "ocdbt", "base": base}
    try:
        keys = tensorstore.KvStore.open(database).result().list().result()
    except Exception as error:  # TensorStore raises many kinds on damaged files
        raise _damaged(path, error) from error
    parts = (key.decode(errors="replace").partition("/") for key in keys)
    names = {name for name, _, rest in parts if rest == _ZARR}
    opening = {
        name: tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": database | {"path": f"{name}/"},
                "fill_missing_data_reads": False,  # a lost chunk is no chunk of zeros
            },
            read=True,
        )
        for name in sorted(names)
    }
    opened = _results(path, opening)
    found = {name: tuple(array.shape) for name, array in opened.items()}
    kinds = {
        name: kind
        for name, array in opened.items()
        if array.dtype.numpy_dtype == np.uint8
        and (kind := kind_of(found[name], expected.get(name, ())))
    }
    found |= {name: expected[name] for name in kinds}
    check_tensors(str(path), found, expected)
    return opened, kinds


def _results(path: Path, futures: dict) -> dict:
    """What the futures give, once all are done: none is left behind by an error."""
    errors = [future.exception() for future in futures.values()]
    for error in errors:
        if error is not None:
            raise _damaged(path, error) from error
    return {name: future.result() for name, future in futures.items()}


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({_first_line(error)}); convert the model again"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
