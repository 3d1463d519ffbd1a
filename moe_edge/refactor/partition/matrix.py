"""One-matrix mode of launch/refactor.py: activations in, labels out."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import atomic_folder, check_out_dir
from moe_edge.core.npy import load_npy
from moe_edge.refactor.partition.problem import check_matrix, check_split
from moe_edge.refactor.partition.report import (
    HELDOUT_RATIO,
    heldout_report,
    print_report,
    quality,
    split_rows,
)
from moe_edge.refactor.partition.solve import DEFAULT, check_solver, solve


def run_matrix(
    *,
    out_dir: str,
    activations: str,
    sub_experts: int = 4,
    inactive: int = 3,
    solver: str = DEFAULT,
    restarts: int | None = None,
    normalise: bool = False,
    heldout_ratio: float = HELDOUT_RATIO,
    seed: int = 0,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Cuts one expert's neurons into sub-experts, given its activations.

    The labels are fitted on all rows. What a fit is worth on other tokens is measured
    by a second fit without `heldout_ratio` of the rows.

    Args:
      out_dir: folder of the results: `labels.npy` (int64 [F], the most important
        sub-expert 0), `partition.json`, `config.gin`.
      activations: `.npy` file [tokens, neurons].
      sub_experts: U, divides the neurons.
      inactive: K of the objective, 1..U-1.
      solver: of SOLVERS.
      restarts: of solver alternate; None: its default.
      normalise: divide every neuron by its mean magnitude before solving.
      heldout_ratio: share of the rows in the held-out check; 0 skips it.
      seed: of everything random.
      overwrite: replace earlier results.
      dry_run: check flags and the file, then stop.
      config_text: gives the config to store.
    Returns:
      objective (sum of |M| over all rows that is left out), share (of all |M|),
      objective_heldout and share_heldout (None without such rows), seconds, out_dir.
    Raises:
      ConfigError: bad input.
      OutputError: `out_dir` cannot be written.
      OSError: the file cannot be read.
    """
    check_out_dir(out_dir, overwrite)
    options = {} if restarts is None else {"restarts": restarts}
    check_solver(solver, options)
    M_TF = read_matrix(activations)
    check_split(M_TF.shape[1], sub_experts, inactive)
    split_rows(len(M_TF), heldout_ratio, seed)
    if dry_run:
        tokens, neurons = M_TF.shape
        return {"dry_run": True, "tokens": tokens, "neurons": neurons}
    started = time.perf_counter()
    options |= {"solver": solver, "seed": seed, "normalise": normalise}
    found = solve(M_TF, sub_experts, inactive, **options)
    seconds = time.perf_counter() - started
    report = heldout_report(
        M_TF, sub_experts, inactive, heldout_ratio=heldout_ratio, **options
    )
    heldout = report["methods"][solver]["heldout"] or {}
    summary = {
        "objective": found.objective,
        "share": found.share,
        "objective_heldout": heldout.get("objective"),
        "share_heldout": heldout.get("share"),
        "seconds": seconds,
    }
    stored = summary | {
        "sub_experts": sub_experts,
        "inactive": inactive,
        **options,
        "tokens": len(M_TF),
        "neurons": M_TF.shape[1],
        "all_rows": quality(M_TF, found.labels, sub_experts, inactive),
        "heldout": report,
    }
    with atomic_folder(out_dir, overwrite) as folder:
        np.save(folder / "labels.npy", found.labels, allow_pickle=False)
        text = json.dumps(stored, indent=1, allow_nan=False)
        (folder / "partition.json").write_text(text + "\n", encoding="utf-8")
        (folder / "config.gin").write_text(config_text(), encoding="utf-8")
    print_report(report)
    return summary | {"out_dir": out_dir}


def read_matrix(path: str | Path) -> np.ndarray:
    """Activations of a `.npy` file, checked; never unpickled.

    Raises:
      ConfigError: no plain array, or one that no solver can take.
      OSError: no such file.
    """
    try:
        M_TF = load_npy(path)
    except (ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path} is no .npy array of numbers ({reason}); write it with "
            "numpy.save(path, array)"
        ) from error
    if not isinstance(M_TF, np.ndarray):
        M_TF.close()
        raise ConfigError(f"{path} is an .npz archive, expected one .npy array")
    return check_matrix(M_TF)
