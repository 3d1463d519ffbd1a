"""One-matrix mode of launch/refactor.py: activations in, labels out."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_json
from moe_edge.core.npy import load_npy
from moe_edge.core.run_folder import RunFolder
from moe_edge.refactor.partition.baselines import MAX_PARTITIONS, num_partitions
from moe_edge.refactor.partition.model import PartitionOptions
from moe_edge.refactor.partition.objective import magnitudes, qualities, quality
from moe_edge.refactor.partition.problem import (
    HELDOUT_RATIO,
    check_matrix,
    check_split,
    split_rows,
)
from moe_edge.refactor.partition.solve import BASELINES, DEFAULT, solve


def run_matrix(
    run: RunFolder, activations: str, options: PartitionOptions
) -> dict[str, Any]:
    """Cuts one expert's neurons into sub-experts, given its activations.

    The labels are fitted on all rows. What a fit is worth on other tokens is measured
    by a second fit without `heldout_ratio` of the rows; 0 skips that.

    Args:
      run: folder of the results: `labels.npy` (int64 [F], the most important
        sub-expert 0) and `partition.json`.
      activations: `.npy` file [tokens, neurons].
      options: how to cut.
    Returns:
      objective (sum of |M| over all rows that is left out), share (of all |M|),
      objective_heldout and share_heldout (None without such rows), seconds; of a dry
      run tokens and neurons.
    Raises:
      ConfigError: bad input.
      OSError: the file cannot be read.
    """
    M_TF = read_matrix(activations)
    T, F = M_TF.shape
    options.check(F)
    if run.dry_run:
        return {"tokens": T, "neurons": F}
    U, inactive = options.sub_experts, options.num_inactive
    started = time.perf_counter()
    how = options.solver_options | {
        "solver": options.chosen_solver,
        "seed": options.seed,
        "normalise": options.normalise,
    }
    found = solve(M_TF, U, inactive, **how)
    seconds = time.perf_counter() - started
    report = heldout_report(
        M_TF, U, inactive, heldout_ratio=options.heldout_ratio, **how
    )
    heldout = report["methods"][options.chosen_solver]["heldout"] or {}
    summary = {
        "objective": found.objective,
        "share": found.share,
        "objective_heldout": heldout.get("objective"),
        "share_heldout": heldout.get("share"),
        "seconds": seconds,
    }
    stored = summary | {
        "sub_experts": U,
        "inactive": inactive,
        **how,
        "tokens": T,
        "neurons": F,
        "all_rows": quality(M_TF, found.labels, U, inactive),
        "heldout": report,
    }
    with run.writing() as folder:
        np.save(folder / "labels.npy", found.labels, allow_pickle=False)
        write_json(folder / "partition.json", stored)
    print_report(report)
    return summary


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


def heldout_report(
    M_TF,
    subs: int,
    inactive: int,
    *,
    solver: str = DEFAULT,
    seed: int = 0,
    heldout_ratio: float = HELDOUT_RATIO,
    token_weights_T=None,
    **options,
) -> dict[str, Any]:
    """Fits a solver and the baselines on some tokens, and scores them on the others.

    Every figure is the paper's objective, whatever was minimised. The optimum of the
    fitted tokens is added where brute force is possible.

    Args:
      M_TF: activations [T, F].
      heldout_ratio: share of the rows, drawn by `seed`, that is held out.
      **options: of `solve`, for the solver only.
    Returns:
      rows_fitted, rows_heldout, methods: name -> {fitted, heldout} of `quality`;
      heldout is None without rows.
    """
    M_TF = check_matrix(M_TF)
    check_split(M_TF.shape[1], subs, inactive)
    fit, held = split_rows(len(M_TF), heldout_ratio, seed)
    if token_weights_T is not None:
        options["token_weights_T"] = np.asarray(token_weights_T)[fit]
    fitted_TF, heldout_TF = magnitudes(M_TF[fit]), magnitudes(M_TF[held])
    names = [name for name in BASELINES if name != solver]
    if num_partitions(M_TF.shape[1], subs) <= MAX_PARTITIONS:
        names.append("brute_force")
    partitions = {
        solver: solve(fitted_TF, subs, inactive, solver=solver, seed=seed, **options)
    }
    for name in names:
        if name not in partitions:
            partitions[name] = solve(fitted_TF, subs, inactive, solver=name, seed=seed)
    labels = {name: found.labels for name, found in partitions.items()}
    fitted = qualities(fitted_TF, labels, subs, inactive)
    heldout = qualities(heldout_TF, labels, subs, inactive) if len(held) else {}
    return {
        "rows_fitted": len(fit),
        "rows_heldout": len(held),
        "methods": {
            name: {"fitted": fitted[name], "heldout": heldout.get(name)}
            for name in labels
        },
    }


def print_report(report: dict[str, Any]) -> None:
    """The report for people, as shares of all |M|."""
    print(f"{'share of |M| left out':24}{'fitted':>9}{'held out':>10}  use of subs")
    for name, both in report["methods"].items():
        held = both["heldout"]
        heldout = f"{100 * held['share']:8.2f} %" if held else f"{'-':>10}"
        used = " ".join(f"{share:.2f}" for share in both["fitted"]["usage"])
        print(f"{name:24}{100 * both['fitted']['share']:7.2f} %{heldout}  {used}")
