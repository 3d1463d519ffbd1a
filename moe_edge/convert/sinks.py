"""Where a conversion writes: a checkpoint of ours, or a Hugging Face folder.

Both take `dense(item, arrays)` of the top and of each layer, and by `experts(layer,
first, records_NR)` the layer's records, in any order and from several threads. Once all
of an item has come, `facts(item)` says what `restore` of another process needs to take
it as written. `finish` completes the folder; `close` stops, complete or not.
"""

import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.checksums import Checksums, item_crc32, make_trailer
from moe_edge.checkpoint.dense import DenseWriter, item_path
from moe_edge.checkpoint.experts_file import (
    EXPERTS_FOLDER,
    experts_path,
    record_crcs,
    write_arrays,
)
from moe_edge.checkpoint.manifest import (
    HF_FOLDER,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    make_manifest,
)
from moe_edge.convert import rules
from moe_edge.convert.content_hash import dense_pieces
from moe_edge.convert.hf_files import copy_small_files, dump_json
from moe_edge.convert.safetensors_writer import SafetensorsWriter
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import Matrix

_LARGE_BYTES = 64 << 20


class OursSink:
    """Writes manifest, expert records and dense items.

    Dense items are saved in a thread of their own, one at a time: importing Orbax
    and its many small writes then overlap with the experts.

    Args:
      folder: empty, or of a run that was interrupted.
      config: the model as it is written; of a refactored one, its parent.
      reader: where it comes from.
      subs, refactor: of a refactored model, see `make_manifest`.
      pruned: of a pruned one, likewise; `config` is its parent's.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        reader,
        subs: int = 1,
        refactor: dict[str, Any] | None = None,
        pruned: dict[str, Any] | None = None,
    ):
        self._folder, self._config, self._reader = folder, config, reader
        self._subs, self._refactor, self._pruned = subs, refactor, pruned
        left = config.moe.num_experts
        if pruned is not None:
            left = len(next(iter(pruned["kept"].values())))
        self._num_records = left * subs  # of a layer
        for name in (EXPERTS_FOLDER, HF_FOLDER):
            (folder / name).mkdir(exist_ok=True)
        copied = copy_small_files(reader.hf_files, folder / HF_FOLDER, config.hf_config)
        known = TOKENIZER_NAME in copied
        self._tokenizer = f"{HF_FOLDER}/{TOKENIZER_NAME}" if known else None
        self._saver = ThreadPoolExecutor(1)
        self._dense = self._saver.submit(DenseWriter, folder)
        self._saving: Future | None = None
        self._lock, self._open = threading.Lock(), {}
        self._checksums, self._kinds = Checksums(), {}

    def restore(self, item, facts):
        self._checksums.dense[item] = facts["dense"]
        self._kinds[item] = set(facts["kinds"])
        if facts["experts"] is not None:
            self._checksums.experts[item] = facts["experts"]

    def facts(self, item):
        self._wait()
        experts = self._checksums.experts.get(item)
        return {
            "dense": self._checksums.dense[item],
            "kinds": sorted(self._kinds[item]),
            "experts": experts,
        }

    def dense(self, item, arrays):
        self._wait()
        self._checksums.dense[item] = item_crc32(arrays)
        blocks = (array for array in arrays.values() if isinstance(array, Matrix))
        self._kinds[item] = {matrix.kind for matrix in blocks}
        shutil.rmtree(item_path(self._folder, item), ignore_errors=True)  # not noted
        dense = self._dense
        self._saving = self._saver.submit(lambda: dense.result().save(item, arrays))
        if sum(array.nbytes for array in arrays.values()) > _LARGE_BYTES:
            self._wait()  # never two large items in memory

    def _wait(self):
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def experts(self, layer, first, records_NR):
        with self._lock:
            if layer not in self._open:
                path, rows = experts_path(self._folder, layer), self._num_records
                file = path.open("wb", buffering=0)
                self._open[layer] = file
                self._checksums.experts[layer] = [None] * rows
            file = self._open[layer]
        write_arrays(file, first * records_NR[0].nbytes, [records_NR])
        crcs = self._checksums.experts[layer]
        crcs[first : first + len(records_NR)] = record_crcs(records_NR)
        with self._lock:
            if None not in crcs and layer in self._open:
                end = len(crcs) * records_NR[0].nbytes
                trailer = np.frombuffer(make_trailer(layer, crcs), np.uint8)
                write_arrays(file, end, [trailer])
                self._open.pop(layer).close()

    def close(self):
        while self._open:
            self._open.popitem()[1].close()
        self._saver.shutdown(cancel_futures=True)

    def finish(self, content_sha256):
        self._wait()
        self.close()
        reader = self._reader
        source = {"hf_path": reader.hf_source, "quantized": reader.quantized}
        manifest = make_manifest(
            self._config,
            dtype=reader.dtype,
            subs=self._subs,
            tokenizer=self._tokenizer,
            source=source | {"dropped": reader.dropped},
            content_sha256=content_sha256,
            refactor=self._refactor,
            pruned=self._pruned,
            checksums=self._checksums,
            dense_kinds=set().union(*self._kinds.values()),
        )
        # Last, so that a folder with a manifest is complete.
        dump_json(self._folder / MANIFEST_NAME, manifest)


class HfSink:
    """Writes safetensors shards and the small files of the folder."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        reader,
        dtypes: dict[str, np.dtype],
        shard_bytes: int,
    ):
        self._config = config
        copy_small_files(reader.hf_files, folder, config.hf_config)
        shapes = rules.hf_shapes(config)
        self._writer = SafetensorsWriter(folder, shapes, dtypes, shard_bytes)

    def restore(self, item, facts):
        self._writer.skip(facts)

    def facts(self, item):
        return rules.item_names(self._config, item)

    def dense(self, item, arrays):
        self._writer.write(*dense_pieces(self._config, item, arrays))

    def experts(self, layer, first, records_NR):
        pieces = rules.records_to_hf(self._config, layer, first, records_NR)
        self._writer.write(*pieces)

    def finish(self, content_sha256):
        self.close()
        self._writer.check_complete()

    def close(self):
        self._writer.close()
