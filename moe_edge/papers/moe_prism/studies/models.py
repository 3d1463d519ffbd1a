"""The models that MoE-Prism's studies compare: which they are; `making.py` makes them.

ORIGINAL is the parent at k' of its experts; LG and LG-FT its sub-experts with a linear
gate before and after fine-tuning of the router; PAPERS has all of the paper's proxy
gate: experts divided by its annealing of its objective, the four most central neurons
of each sub-expert, and a list of how many sub-experts the expert of each rank runs.
CENTRAL has its neurons alone, on our division and with our ranking of all sub-experts
together. Ours are CG, a proxy gate whose neurons are fitted, CALIBRATED, with rows that
predict norms, both untrained, and the two that are fine-tuned towards the parent (KL)
at every K. K counts sub-experts, so the parent at k' computes as many neurons as the
others at k' U.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from moe_edge.bench.settings import Positive, StudySettings, known
from moe_edge.core.checks import ConfigError
from moe_edge.core.json_reader import read_json
from moe_edge.metrics.frames import Rows

ORIGINAL, LG, LG_FT, CALIBRATED = "original", "LG", "LG-FT", "calibrated"
PAPERS, CENTRAL, CG = "CG, the paper's", "CG, central", "CG, ours"
LG_KL, CALIBRATED_KL = "LG-FT, KL", "calibrated, KL"


class Kind(NamedTuple):
    """A refactored model.

    Attributes:
      field: of the settings.
      gate: of moe-edge refactor.
      follows: fine-tuned towards the parent.
      options: more of moe-edge refactor.
    """

    field: str
    gate: str
    follows: bool = False
    options: Mapping[str, Any] = {}


FOUR_CENTRAL = {"gate_choice": "central", "gate_neurons": 4}
ANNEALED = {"solver": "anneal", "weigh_neurons": False}
KINDS = {  # in order of making
    LG: Kind("lg", "lg"),
    PAPERS: Kind(
        "cg_paper", "cg", options=FOUR_CENTRAL | ANNEALED | {"proxy_rule": "pattern"}
    ),
    CENTRAL: Kind("cg_central", "cg", options=FOUR_CENTRAL),
    CG: Kind("cg", "cg"),
    CALIBRATED: Kind("calibrated", "calibrated"),
    LG_FT: Kind("lg_ft", "lg_ft"),
    LG_KL: Kind("lg_kl", "lg_ft", follows=True),
    CALIBRATED_KL: Kind("calibrated_kl", "calibrated_ft", follows=True),
}
BY_FIELD = {kind.field: kind for kind in KINDS.values()}
Made = tuple[Annotated[str, known("gate", BY_FIELD)], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(StudySettings):
    """The part of a study's settings that says which models it compares.

    Attributes:
      checkpoint: the parent, path or `default`.
      lg, lg_ft, lg_kl, cg, cg_central, cg_paper, calibrated, calibrated_kl:
        refactored checkpoints; None leaves one out.
      make: those of them to make, in `work_dir`, unless they are there: by a profile of
        `calibration_tokens` of `calibration`, and fine-tuned ones with options
        `fine_tuning` on the prose that the default model was trained on.
      rates: learning rates of which each takes its own, by the loss on held-out prose
        after a short run of `rate_tokens`; none: that of `fine_tuning`.
      data_dir: where relative paths are looked up too.
    """

    checkpoint: str = "default"
    lg: str | None = None
    lg_ft: str | None = None
    cg: str | None = None
    cg_central: str | None = None
    cg_paper: str | None = None
    calibrated: str | None = None
    lg_kl: str | None = None
    calibrated_kl: str | None = None
    make: Made = ()
    work_dir: str = "results/local/moe_prism"
    calibration: Sequence[str] = ("text/wikitext-2/train.txt", "text/c4_web.txt")
    calibration_tokens: int = 131_072
    fine_tuning: Mapping[str, Any] | None = None
    rates: tuple[Positive, ...] = ()
    rate_tokens: int = 204_800
    data_dir: str | None = None

    def checkpoints(self) -> dict[str, str]:
        """Name -> path of the models that are compared, the parent first.

        Raises:
          ConfigError: no refactored one.
        """
        paths = {name: getattr(self, kind.field) for name, kind in KINDS.items()}
        found = {name: path for name, path in paths.items() if path}
        if not found:
            raise ConfigError(
                "no refactored checkpoint given; name those of moe-edge refactor in "
                f"{', '.join(BY_FIELD)}, or list in `make` what to make"
            )
        return {ORIGINAL: self.checkpoint} | found


def provenance(settings: ModelSettings) -> dict:
    """How the compared models came about, from their reports, for the entry."""
    found = {}
    for field in BY_FIELD:
        report = Path(getattr(settings, field) or "") / "report.json"
        if getattr(settings, field) and report.is_file():
            known = read_json(report)
            kept = ("gate", "objective", "objective_heldout", "fine_tuning")
            found[field] = {key: known[key] for key in kept if key in known}
            # A path of one machine.
            found[field].get("fine_tuning", {}).pop("out_dir", None)
    return found


def tell(
    rows: Rows, settings: ModelSettings, model: Mapping, workload: Mapping
) -> None:
    """What is said of a study of refactored models.

    Args:
      settings: of the study; the entry's workload begins with its own ones.
      workload: what was read, of which size.
    """
    rows.about |= {
        "model": model,
        "workload": own_settings(settings) | dict(workload),
        "baselines": [ORIGINAL],
    }
    rows.about["workload"]["refactored"] = provenance(settings)


def own_settings(settings: ModelSettings) -> dict[str, Any]:
    """All but those of `ModelSettings`."""
    models = {field.name for field in dataclasses.fields(ModelSettings)}
    return {name: v for name, v in vars(settings).items() if name not in models}
