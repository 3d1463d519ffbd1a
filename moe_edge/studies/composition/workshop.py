"""The model of the study, its variants, the text, and what is measured already."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.started import start_number
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.files import write_json
from moe_edge.core.json_reader import as_read_back, read_json
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.layerwise import LayerwiseText, cut_tokens
from moe_edge.evaluate.stepwise import ForcedRun
from moe_edge.evaluate.texts import read_text, sha256_of
from moe_edge.offload.link import EmulatedLink
from moe_edge.studies.composition.methods import Method, Variant
from moe_edge.studies.composition.settings import ComposeSettings
from moe_edge.studies.composition.times import TIMED_ROWS
from moe_edge.studies.composition.variants import Variants

TIMED = 96  # tokens of a row that steps are timed on
BASE = Variant()


class Workshop:
    """The model, its variants, the text, and what has been measured so far."""

    def __init__(self, settings: ComposeSettings):
        self.settings = settings
        reader = open_checkpoint(settings.checkpoint)
        self.moe, self.layers = reader.config.moe, len(reader.config.moe_layers)
        self.record_bytes = reader.layout.num_bytes(reader.dtype)
        self.tokenizer = load_tokenizer(reader)
        path = settings.path(settings.text)
        ids = self.tokenizer.encode(read_text(path))
        self.tokens_NS = cut_tokens(ids, settings.tokens, settings.length)
        self.workload = _workload(settings, reader, path)
        digest = hashlib.sha256(json.dumps(self.workload).encode()).hexdigest()[:12]
        self.folder = Path(settings.work_dir) / digest
        (self.folder / "cases").mkdir(parents=True, exist_ok=True)
        self.variants = Variants(settings, self.folder)
        first = (start_number() or 0) * TIMED_ROWS  # of its own, as far as they go
        self.timed_rows = np.roll(self.tokens_NS[:, :TIMED], -first, axis=0).tolist()
        self._loaded: dict[tuple, Any] = {}

    def done(self, name: str, measure: Callable[..., Any], *given) -> Any:
        """What `measure(*given)` gives, in JSON's types; kept under a name."""
        path = self.folder / "cases" / f"{_file_name(name)}.json"
        if not path.is_file():
            write_json(path, measure(*given))
        return read_json(path)

    def timed(self, name: str, measure: Callable[..., Any], *given) -> Any:
        """Likewise, of times: a start measures its own."""
        if start_number() is None:
            return self.done(name, measure, *given)
        return as_read_back(measure(*given))

    def lookups(self, method: Method, share: float) -> Path:
        """The file of what a method looked up."""
        name = _file_name(f"{method.name} {share}")
        return self.folder / "lookups" / name / "trace.csv.gz"

    @functools.cached_property
    def reference(self) -> ForcedRun:
        """The model as it is; not run where all is measured already."""
        return self.plain_run(BASE, None).forced

    # What a variant is.

    def k_of(self, method: Method) -> int | None:
        """Experts (or sub-experts) that a token computes; None: the model's own."""
        if method.k_share == 1:
            return None
        return round(method.k_share * self.moe.top_k * method.variant.subs)

    def block_bytes(self, variant: Variant) -> int:
        reader = open_checkpoint(self.variants.folder(variant))
        return reader.layout.num_bytes(reader.dtype)

    def experts(self, variant: Variant) -> int:
        config = open_checkpoint(self.variants.folder(variant)).config
        return config.moe.num_experts

    def slots(self, method: Method, share: float) -> int | None:
        """Slots of each layer; None: what the budget leaves is no two slots."""
        left = (share - method.shadow) * self.moe.num_experts * self.record_bytes
        slots = int(left / self.block_bytes(method.variant) + 1e-9)
        if slots < 2:
            return None
        return min(slots, self.experts(method.variant))

    def text(self, variant: Variant, k: int | None) -> LayerwiseText:
        """The text before a variant; the last one is kept, with what it ran."""
        if (variant, k) not in self._loaded:
            folder = self.variants.folder(variant)
            engine = load_engine(folder, with_tokenizer=False).engine.at_k(k)
            self._loaded = {(variant, k): LayerwiseText(engine, self.tokens_NS)}
        return self._loaded[variant, k]

    def plain_run(self, variant: Variant, k: int | None):
        """The text by the model's own choices."""
        text = self.text(variant, k)
        if "plain" not in self._loaded:
            self._loaded["plain"] = text.run()
        return self._loaded["plain"]


def link_of(shop: Workshop, factor: float, layer_s: float) -> EmulatedLink:
    """On which a bfloat16 record takes `factor` layers, and the latency."""
    rate = shop.record_bytes / (factor * layer_s)
    return EmulatedLink(rate, shop.settings.link_latency_s)


def _workload(settings: ComposeSettings, reader, path: Path) -> dict[str, Any]:
    """What was measured; names the folder of finished cases, too."""
    elsewhere = {"work_dir", "data_dir", "live_cases", "link_factors", "shares"}
    elsewhere |= {"processor_time"}
    fields = dataclasses.asdict(settings).items()
    return {name: value for name, value in fields if name not in elsewhere} | {
        "text_sha256": sha256_of(path),
        "calibration_sha256": sha256_of(settings.path(settings.calibration)),
        "links": list(settings.link_factors),
        "path": str(reader.path.name),
    }


def _file_name(name: str) -> str:
    """A file for a case, told apart from others that read alike."""
    words = "".join(c if c.isalnum() else "_" for c in name)[:60]
    return f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
