"""The root of `moe-edge train_board`: a board whose experts are trained."""

from collections.abc import Callable
from typing import Any

from moe_edge.core.checks import chosen
from moe_edge.core.files import check_work_folder, locked_folder, write_text
from moe_edge.core.run_folder import CONFIG_NAME, unpacked
from moe_edge.papers.coserve.coe.board_options import WIDER, BoardOptions, Recipe


@unpacked(options=BoardOptions, recipe=Recipe)
def run_train_board(
    out_dir: str,
    *,
    options: BoardOptions,
    recipe: Recipe,
    compare: str = "",
    seed: int = 0,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Trains a board's experts one by one, or goes on with what `out_dir` holds.

    An expert whose file is there, and was trained as it would be now, is left as it is.
    So a stopped run goes on, and a larger board keeps the experts of a smaller one.

    A board that `out_dir` holds stays whole until the new one is: files of weights are
    named by what they hold, coe.json changes last, at once. Only then what neither it
    nor training.json names any more is deleted; who still serves the old board fails
    the requests of experts that it has to load then.

    Args:
      out_dir: receives coe.json, experts/, training.json and, to `compare`,
        accuracy.json and the networks beside the board; an accuracy.json of other
        weights is deleted.
      options: what the board has; recipe: how each expert is trained.
      compare: train one network for all types too, for as many steps as all experts
        together: `single`, as wide as an expert, `single_wide`, four times as wide,
        whose steps take ten times as long, or `all`.
      seed: of weights, images and frequencies.
      dry_run: check settings and `out_dir`, write nothing.
      config_text: gives the settings to store as config.gin.
    Returns:
      types, trained (experts), seconds (of training them), accuracy_mean and
      accuracy_min (of trained experts, on held-out images).
    Raises:
      MoeEdgeError: bad input.
    """
    known = chosen("network to compare with", compare, WIDER) if compare else []
    names = list(WIDER) if known is None else known
    if dry_run:
        check_work_folder(out_dir)
        return {"dry_run": True, "types": options.types, "out_dir": out_dir}
    # Only now: these load JAX, and a refused value should not wait for that.
    from moe_edge.papers.coserve.coe.board_training import train_experts
    from moe_edge.papers.coserve.coe.single_model import train_singles

    with locked_folder(out_dir, out_dir) as folder:
        trained = train_experts(folder, options, recipe, seed)
        if names:
            train_singles(folder, options, recipe, seed, names)
        if text := config_text():
            write_text(folder / CONFIG_NAME, text)
    accuracies = [one.accuracy for one in trained]
    return {
        "types": options.types,
        "trained": len(trained),
        "seconds": sum(one.seconds for one in trained),
        "accuracy_mean": sum(accuracies) / len(accuracies),
        "accuracy_min": min(accuracies),
        "out_dir": out_dir,
    }
