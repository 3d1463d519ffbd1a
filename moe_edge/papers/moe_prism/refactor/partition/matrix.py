"""One-matrix mode of moe-edge refactor: activations in, labels out."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_json
from moe_edge.core.npy import load_npy
from moe_edge.core.run_folder import RunFolder
from moe_edge.papers.moe_prism.refactor.partition.baselines import (
    MAX_PARTITIONS,
    num_partitions,
)
from moe_edge.papers.moe_prism.refactor.partition.objective import (
    magnitudes,
    objective,
    qualities,
)
from moe_edge.papers.moe_prism.refactor.partition.problem import (
    build_problem,
    check_matrix,
    split_rows,
)
from moe_edge.papers.moe_prism.refactor.partition.solve import BASELINES, solve
from moe_edge.papers.moe_prism.refactor.settings import PartitionOptions


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
    how = options.solver_options | {
        "solver": options.chosen_solver,
        "seed": options.seed,
        "normalise": options.normalise,
    }
    started = time.perf_counter()
    labels = _fit(M_TF, options)
    seconds = time.perf_counter() - started
    cost = objective(M_TF, labels, U, inactive)
    report = heldout_report(M_TF, options)
    heldout = report["methods"][options.chosen_solver]["heldout"] or {}
    summary = {
        "objective": cost,
        "share": cost / float(magnitudes(M_TF).sum(dtype=np.float64)),
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
        "all_rows": qualities(M_TF, {"all": labels}, U, inactive)["all"],
        "heldout": report,
    }

    def save(folder: Path) -> None:
        np.save(folder / "labels.npy", labels, allow_pickle=False)
        write_json(folder / "partition.json", stored)

    run.write(save)
    print_report(report)
    return summary


def _fit(M_TF, options: PartitionOptions) -> np.ndarray:
    """Labels by the solver that was chosen."""
    problem = build_problem(
        M_TF, options.sub_experts, options.num_inactive, normalise=options.normalise
    )
    given = options.solver_options
    return problem.ordered(solve(problem, options.chosen_solver, options.seed, **given))


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


def heldout_report(M_TF, options: PartitionOptions) -> dict[str, Any]:
    """Fits a solver and the baselines on some tokens, and scores them on the others.

    Every figure is the paper's objective, whatever was minimised. The optimum of the
    fitted tokens is added where brute force is possible.

    Args:
      M_TF: activations [T, F].
      options: `heldout_ratio` of the rows, drawn by `seed`, are held out.
    Returns:
      rows_fitted, rows_heldout, methods: name -> {fitted, heldout} of `qualities`;
      heldout is None without rows.
    """
    U, inactive = options.sub_experts, options.num_inactive
    fit, held = split_rows(len(M_TF), options.heldout_ratio, options.seed)
    plain = build_problem(M_TF[fit], U, inactive)
    names = [*BASELINES]
    if num_partitions(plain.neurons, U) <= MAX_PARTITIONS:
        names.append("brute_force")
    labels = {options.chosen_solver: _fit(M_TF[fit], options)}
    for name in names:
        if name not in labels:
            labels[name] = plain.ordered(solve(plain, name, options.seed))
    fitted = qualities(M_TF[fit], labels, U, inactive)
    heldout = qualities(M_TF[held], labels, U, inactive) if len(held) else {}
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
    print(
        "share of the neurons' activity that lies in inactive sub-experts, by how the"
    )
    print(
        "neurons are split; lower is better. Last: how often each sub-expert is active"
    )
    print(f"{'split':24}{'fitted':>9}{'held out':>10}  active")
    for name, both in report["methods"].items():
        held = both["heldout"]
        heldout = f"{100 * held['share']:8.2f} %" if held else f"{'-':>10}"
        used = " ".join(f"{share:.2f}" for share in both["fitted"]["usage"])
        print(f"{name:24}{100 * both['fitted']['share']:7.2f} %{heldout}  {used}")
