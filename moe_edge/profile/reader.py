"""Reads a profile folder; every file is checked and nothing is ever unpickled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.core.json_reader import json_objects, read_json
from moe_edge.core.npy import load_npy
from moe_edge.profile.writer import COUNTS_NAME, HIDDEN, PROFILE_NAME, expert_path

FORMAT_VERSION = 1
UNSEEN = -1  # a count that no line gave
RERUN = "run moe-edge profile_model again"


class Profile:
    """An open profile.

    Attributes:
      path: its folder.
      info: `profile.json`.
      layers: ids of the MoE layers.
      num_experts, neurons, top_k: E, F, K of the model that was profiled.
      domains: names of the text domains.
      content_sha256: of the checkpoint that was profiled.
      counts_NLE: int64, choices by domain, layer (row of `layers`) and expert.
    """

    def __init__(self, path: Path, info: dict[str, Any], counts_NLE: np.ndarray):
        self.path, self.info, self.counts_NLE = path, info, counts_NLE
        self.layers = tuple(info["layers"])
        self.num_experts, self.neurons = info["E"], info["F"]
        self.top_k, self.max_tokens = info["top_k"], info["max_tokens_per_expert"]
        self.domains = tuple(info["domains"])
        self.content_sha256 = info["content_sha256"]

    def check(self, content_sha256: str) -> None:
        """Refuses a profile of another checkpoint.

        Raises:
          CheckpointError: the hash is not that of the profiled checkpoint.
        """
        if content_sha256 != self.content_sha256:
            raise CheckpointError(
                f"profile {self.path} is of checkpoint {self.info['checkpoint']!r} "
                f"with content {self.content_sha256[:12]}, this one has "
                f"{content_sha256[:12]}; run moe-edge profile_model on it"
            )

    def tokens_of(self, layer: int, expert: int) -> int:
        """How many tokens chose an expert: at least as many as were kept."""
        return int(self.counts_NLE[:, self._row(layer, expert), expert].sum())

    def activations(self, layer: int, expert: int) -> np.ndarray:
        """float16 [T, F], memory-mapped: what the experts multiply by down.

        Rows are a uniform sample of the tokens routed to the expert, in random order.

        Raises:
          ConfigError: no such layer or expert.
          CheckpointError: the file is missing or damaged.
        """
        return self._array("activations", np.float16, layer, expert, self.neurons)

    def gate_weights(self, layer: int, expert: int) -> np.ndarray:
        """float32 [T]: the router's weight of the expert for the same rows."""
        return self._array("weights", np.float32, layer, expert)

    def ranks(self, layer: int, expert: int) -> np.ndarray:
        """int8 [T]: place of the expert in the token's top-k, for the same rows."""
        return self._array("ranks", np.int8, layer, expert)

    def hidden(self, layer: int, expert: int) -> np.ndarray:
        """float16 [T, D]: the expert's input, the normed hidden state, for these rows.

        Raises:
          ConfigError: the profile has none, see `check_hidden`.
        """
        self.check_hidden()
        return self._array(HIDDEN, np.float16, layer, expert, self.info["D"])

    def check_hidden(self) -> None:
        """Raises ConfigError if the profile was made without hidden states."""
        if not self.info.get("hidden"):
            raise ConfigError(
                f"profile {self.path} has no hidden states, on which a calibrated gate "
                "is fitted; run moe-edge profile_model with --hidden"
            )

    def _row(self, layer: int, expert: int) -> int:
        if layer not in self.layers or not 0 <= expert < self.num_experts:
            raise ConfigError(
                f"profile {self.path} has no expert {expert} in layer {layer}; it has "
                f"layers {', '.join(map(str, self.layers))} of {self.num_experts}"
            )
        return self.layers.index(layer)

    def _array(self, kind: str, dtype, layer: int, expert: int, *width: int):
        """Memory-maps an expert's file: a row a kept token."""
        shape = (min(self.tokens_of(layer, expert), self.max_tokens), *width)
        path = expert_path(self.path, kind, layer, expert)
        try:
            array = load_npy(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; {RERUN}") from error
        found = getattr(array, "dtype", None), getattr(array, "shape", None)
        if found != (dtype, shape):
            raise CheckpointError(
                f"{path} holds {found[0]} {found[1]}, expected {np.dtype(dtype)} "
                f"{shape}; {RERUN}"
            )
        return array


def open_profile(path: str | Path) -> Profile:
    """Opens a folder written by `run_profile`.

    Raises:
      CheckpointError: no profile, an unknown version, or damaged.
    """
    path = Path(path)
    if not (path / PROFILE_NAME).is_file():
        raise CheckpointError(
            f"{path} holds no {PROFILE_NAME}; make a profile with "
            "moe-edge profile_model"
        )
    info = _read_info(path / PROFILE_NAME)
    layers, domains = info["layers"], info["domains"]
    shape = (len(domains), len(layers), info["E"])
    counts_NLE = np.full(shape, UNSEEN, np.int64)
    rows = list(json_objects(path / COUNTS_NAME, CheckpointError))
    try:
        for _, row in rows:
            at = domains.index(row["domain"]), layers.index(row["layer"])
            if counts_NLE[at][0] != UNSEEN:
                raise ValueError(f"domain and layer {at} stand twice")
            counts_NLE[at] = _check_row(row, info)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{path / COUNTS_NAME} does not fit {PROFILE_NAME}: "
            f"{type(error).__name__}: {error}; {RERUN}"
        ) from error
    chosen_L = counts_NLE.sum(axis=(0, 2))
    wanted = info["tokens"] * info["top_k"]
    if (counts_NLE == UNSEEN).any() or (chosen_L != wanted).any():
        raise CheckpointError(
            f"{path / COUNTS_NAME} lacks a domain or layer: expected "
            f"{info['tokens']} tokens in each; {RERUN}"
        )
    profile = Profile(path, info, counts_NLE)
    for layer in profile.layers:
        for expert in range(profile.num_experts):
            if not expert_path(path, "activations", layer, expert).is_file():
                raise CheckpointError(
                    f"profile {path} lacks the activations of expert {expert} in "
                    f"layer {layer}; {RERUN}"
                )
    return profile


def _read_info(path: Path) -> dict[str, Any]:
    info = read_json(path, CheckpointError)
    found = info.get("format_version") if isinstance(info, dict) else None
    if found != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {found}, expected {FORMAT_VERSION}; {RERUN}"
        )
    bad = [name for name, fits in _FIELDS.items() if not fits(info.get(name))]
    if bad:
        raise CheckpointError(f"{path}: missing or wrong {', '.join(bad)}")
    return info


def _is_count(value) -> bool:
    return type(value) is int and 0 < value < 2**63


def _is_size(value) -> bool:
    """Of an axis; tables are made of this size."""
    return _is_count(value) and value <= 2**20


def _is_text(value) -> bool:
    return type(value) is str


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    def fits(value) -> bool:
        return type(value) is list and {type(item) for item in value} == {kind}

    return fits


# What `profile.json` must hold.
_FIELDS = {
    **dict.fromkeys(("L", "E", "F", "D", "top_k"), _is_size),
    **dict.fromkeys(("tokens", "max_tokens_per_expert"), _is_count),
    **dict.fromkeys(("content_sha256", "checkpoint"), _is_text),
    "layers": _is_list_of(int),
    "domains": _is_list_of(str),
}


def _check_row(row: dict[str, Any], info: dict[str, Any]) -> list[int]:
    """Counts of one line.

    Raises:
      ValueError, KeyError: they are not those of E experts and the line's tokens.
    """
    where, counts = f"domain {row['domain']!r}, layer {row['layer']}", row["counts"]
    if (
        not isinstance(counts, list)
        or len(counts) != info["E"]
        or not all(type(count) is int and count >= 0 for count in counts)
    ):
        raise ValueError(
            f"{where}: counts are {str(counts)[:40]}, expected {info['E']} whole "
            "numbers from 0"
        )
    tokens = row["tokens"]
    if type(tokens) is not int or sum(counts) != tokens * info["top_k"]:
        raise ValueError(
            f"{where}: counts sum to {sum(counts)}, expected {tokens!r} tokens x "
            f"{info['top_k']} choices"
        )
    return counts
