"""manifest.json: what a checkpoint of ours says about itself.

OURS/manifest.json            this file
OURS/experts/layer_LLL.bin    expert records of a MoE layer (experts_file.py)
OURS/dense/top, layer_LLL     everything else, one Orbax item each (dense.py)
OURS/hf/                      small files of the HF folder, byte for byte

A refactored model has an object `refactor`: {"gate": one of `config_checks.GATES`,
"gate_neurons": r, "rank_shares": [[..]], and where it came from: inactive, solver,
seed, parent_sha256, profile, fine_tuned}. `hf_config`, `E` and the like stay the
parent's; only `U` and the records tell of the split.

A pruned model has an object `pruned`: {"kept": {layer: [ids]}}, the parent's experts
that it still has, in its order, and where it came from: by, parent_sha256, profile.
`hf_config` and `E` stay the parent's here, too.

`checksums` (checksums.py) are new in format version 2; version 1 is still read.

`dtype` is of the experts' records. q8_0, q4_0, mxfp4, int4 and fp8, with their rows in
eights q8_0x8 and so on, are quantised (model/record.py, quantised.py); `hf_config`
still says in which dtype the model was, and the dense weights are, unless `dense_dtype`
names the kinds of blocks that matrices among them are in, such as "q4_0x8" or
"q4_0+q8_0x8" (dense.py). Then `format_version` is 3.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.checksums import KEY, Checksums
from moe_edge.checkpoint.dtypes import RECORD_DTYPES
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.core.json_reader import read_json
from moe_edge.model.config import ModelConfig
from moe_edge.model.pruned import kept_experts, pruned_config
from moe_edge.model.quantised import STORED_KINDS
from moe_edge.model.record import RecordLayout
from moe_edge.model.sub_experts import split_config

MANIFEST_NAME = "manifest.json"
REPORT_NAME = "report.json"  # of a refactored checkpoint: perplexity by K, and more
HF_FOLDER = "hf"
TOKENIZER_NAME = "tokenizer.json"
FORMAT_VERSION = 2
_WITHOUT_CHECKSUMS, _DENSE_BLOCKS = 1, 3
_MAX_BYTES = 64 << 20
_TYPES: dict[str, type | tuple[type, ...]] = {
    "format_version": int,
    "model_type": str,
    "hf_config": dict,
    "dtype": str,
    "L": int,
    "E": int,
    "U": int,
    "record": dict,
    "tokenizer": (str, type(None)),
    "source": dict,
    "content_sha256": str,
}
_OPTIONAL = {"refactor": dict, "pruned": dict, "dense_dtype": str}
_WORDS = {
    int: "a whole number",
    str: "a text",
    dict: "an object",
    type(None): "null",
}


def record_layout(config: ModelConfig, subs: int) -> RecordLayout:
    """Layout of one record: an expert, or one of its U equal sub-experts."""
    if config.moe.expert_dim % subs:
        raise CheckpointError(
            f"experts of {config.moe.expert_dim} neurons do not split into U={subs}"
        )
    parent = RecordLayout.of(config)
    return dataclasses.replace(parent, expert_dim=parent.expert_dim // subs)


def make_manifest(
    config: ModelConfig,
    *,
    dtype: np.dtype,
    subs: int,
    tokenizer: str | None = None,
    source: dict[str, Any] | None = None,
    content_sha256: str = "",
    refactor: dict[str, Any] | None = None,
    pruned: dict[str, Any] | None = None,
    checksums: Checksums | None = None,
    dense_kinds: Iterable[str] = (),
) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are already written.

    Args:
      config: the model before it was refactored.
      dtype: of the records' elements.
      subs: U, sub-experts of an expert.
      tokenizer: path inside the folder, or None.
      source: where it came from.
      content_sha256: see `convert/content_hash.py`.
      refactor: gate and provenance of a refactored model.
      pruned: kept experts and provenance of a pruned one.
      checksums: of the files as written.
      dense_kinds: of `quantised.KINDS`, those of dense matrices.
    """
    layout, dense = record_layout(config, subs), "+".join(sorted(dense_kinds))
    return {
        "format_version": _DENSE_BLOCKS if dense else FORMAT_VERSION,
        "model_type": config.model_type,
        "hf_config": config.hf_config,
        "dtype": layout.kind or dtype.name,
        **({"dense_dtype": dense} if dense else {}),
        "L": config.num_layers,
        "E": config.moe.num_experts,
        "U": subs,
        "record": {
            "order": list(layout.shapes),
            "shapes": {name: list(shape) for name, shape in layout.shapes.items()},
            "bytes": layout.num_bytes(dtype),
            "file": "experts/layer_{layer:03d}.bin",
            # Record (expert, sub) of a layer begins at offset + (e * U + sub) * bytes.
            "offset": 0,
        },
        "tokenizer": tokenizer,
        "source": source or {},
        "content_sha256": content_sha256,
        **({} if refactor is None else {"refactor": refactor}),
        **({} if pruned is None else {"pruned": pruned}),
        KEY: (checksums or Checksums()).as_json(),
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads and checks manifest.json (types and version; not against the config).

    Raises:
      CheckpointError: missing, not JSON, another version, keys missing, unknown or
        mistyped.
    """
    path = folder / MANIFEST_NAME
    manifest = read_json(path, CheckpointError, strict=False, max_bytes=_MAX_BYTES)
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    version = manifest.get("format_version")
    known = _WITHOUT_CHECKSUMS, FORMAT_VERSION, _DENSE_BLOCKS
    if version not in known or version is True:
        raise CheckpointError(
            f"{path} has format_version {version!r}, this program reads "
            f"{', '.join(map(str, known))}; convert the model again"
        )
    types = _TYPES | ({} if version == _WITHOUT_CHECKSUMS else {KEY: dict})
    _check_keys(path, manifest, types)
    if manifest["dtype"] not in RECORD_DTYPES or manifest["U"] < 1:
        raise CheckpointError(
            f"{path}: dtype {manifest['dtype']!r} and U {manifest['U']}, "
            f"expected one of {', '.join(RECORD_DTYPES)} and U >= 1"
        )
    dense = manifest.get("dense_dtype")
    if (dense is not None) != (version == _DENSE_BLOCKS) or not (
        dense is None or {*dense.split("+")} <= {*STORED_KINDS}
    ):
        raise CheckpointError(
            f"{path}: dense_dtype {dense!r} in format_version {version}, expected some "
            f"of {', '.join(STORED_KINDS)} joined by + in {_DENSE_BLOCKS}, else "
            "none; convert the model again"
        )
    return manifest


def _check_keys(path: Path, manifest: dict[str, Any], types: dict[str, Any]) -> None:
    """Refuses a manifest without one of these keys, with another, or another type."""
    if missing := [key for key in types if key not in manifest]:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}; convert the model again"
        )
    types = types | _OPTIONAL
    if unknown := [key for key in manifest if key not in types]:
        raise CheckpointError(
            f"{path} has unknown keys {', '.join(unknown)}; known: {', '.join(types)}; "
            "convert the model again"
        )
    for key, value in manifest.items():
        if not isinstance(value, types[key]) or isinstance(value, bool):
            kinds = types[key] if isinstance(types[key], tuple) else (types[key],)
            raise CheckpointError(
                f"{path}: {key} is {value!r:.60}, expected "
                f"{' or '.join(_WORDS[kind] for kind in kinds)}"
            )


def read_checksums(
    folder: Path, manifest: dict[str, Any], config: ModelConfig
) -> Checksums | None:
    """The checksums of a manifest, as `Checksums.of_manifest`; None: version 1."""
    if manifest["format_version"] == _WITHOUT_CHECKSUMS:
        return None
    return Checksums.of_manifest(folder / MANIFEST_NAME, manifest[KEY], config)


def check_manifest(
    folder: Path, manifest: dict[str, Any], config: ModelConfig
) -> RecordLayout:
    """Checks the manifest against the config; returns the record layout.

    Raises:
      CheckpointError: names the key that disagrees, with both values.
    """
    layout = record_layout(config, manifest["U"])
    dtype = RECORD_DTYPES[manifest["dtype"]]
    expected = make_manifest(config, dtype=dtype, subs=manifest["U"])
    for key in ("model_type", "L", "E", "record"):
        if manifest[key] != expected[key]:
            raise CheckpointError(
                f"{folder / MANIFEST_NAME}: {key} is {manifest[key]}, but its "
                f"hf_config means {expected[key]}"
            )
    return layout


def with_kind(config: ModelConfig, dtype_name: str) -> ModelConfig:
    """The config with the kind of records that a manifest's `dtype` names."""
    kind = dtype_name if dtype_name in STORED_KINDS else None
    moe = dataclasses.replace(config.moe, expert_kind=kind)
    return dataclasses.replace(config, moe=moe)


def config_of_manifest(
    folder: Path, manifest: dict[str, Any], parent: ModelConfig
) -> ModelConfig:
    """The model that a checkpoint holds: the parent, the parent split, or pruned.

    Raises:
      CheckpointError: sub-experts without `refactor`, or one that does not fit; experts
        of `pruned` that the parent has not.
    """
    refactor, subs = manifest.get("refactor"), manifest["U"]
    if (pruned := manifest.get("pruned")) is not None:
        try:
            return pruned_config(parent, kept_experts(parent, pruned.get("kept")))
        except (ConfigError, TypeError, ValueError) as error:
            where = f"{folder}: pruned of the manifest"
            raise CheckpointError(f"{where}: {error}") from error
    if refactor is None and subs == 1:
        return parent
    if not isinstance(refactor, dict):
        raise CheckpointError(
            f"{folder}: U is {subs}, but the manifest has no `refactor` that says how "
            "sub-experts are chosen; refactor the model again (moe-edge refactor)"
        )
    shares = refactor.get("rank_shares") or ()
    try:
        return split_config(
            parent,
            subs,
            gate=refactor.get("gate", "linear"),
            gate_neurons=refactor.get("gate_neurons", 0),
            rank_shares=tuple(tuple(float(x) for x in row) for row in shares),
        )
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: refactor of the manifest: {error}") from error
