"""Prediction by probes: small networks that name a later layer's experts.

Ours. The router of a later layer, run on an earlier state (`stale_gate.py`), was never
trained for that state. A probe was: rows and gated neurons that name, on the state that
the experts of layer l took, which experts layer l + j chose in a calibration text
(`profile/probes.py` fits them, `moe-edge profile_model --probes` writes them).
"""

import dataclasses
import functools
from pathlib import Path
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import CheckpointError, ConfigError, check_count
from moe_edge.core.json_reader import read_json
from moe_edge.core.npy import load_npy
from moe_edge.core.plug_in import register
from moe_edge.model.config import ModelConfig
from moe_edge.predict.stale_gate import Flat, LooksAhead

FOLDER = "probes"


def probe_path(profile: str | Path, layer: int, target: int) -> Path:
    """File of the rows that name a layer's experts on the state of an earlier one."""
    return Path(profile) / FOLDER / f"{layer:03d}_{target:03d}.npy"


def neurons_path(profile: str | Path, layer: int, target: int) -> Path:
    """File of the neurons beside them."""
    path = probe_path(profile, layer, target)
    return path.with_name(f"{path.stem}_neurons.npy")


@register
@dataclasses.dataclass(frozen=True, eq=False)
class Probe(LooksAhead):
    """Probes of a profile on the current state, for the next layers.

    Attributes:
      profile: folder of moe-edge profile_model of this model, with probes that reach
        `look_ahead` layers. Its shape is checked, not its weights: those of another
        model of the same shape predict badly.
    """

    config: ModelConfig
    profile: str
    look_ahead: int = 1
    name: ClassVar[str] = "probe"
    SOURCE: ClassVar[str] = "ours"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    from_context: ClassVar[dict[str, str]] = {"config": "model"}

    def __post_init__(self):
        check_count("look_ahead", self.look_ahead)
        self._check_model()
        if not (Path(self.profile) / FOLDER).is_dir():
            raise ConfigError(
                f"profile {self.profile} has no probes; run moe-edge profile_model "
                f"with --probes {self.look_ahead} or more"
            )
        _ = self._probes  # all of them are read before anything runs

    def _check_model(self) -> None:
        """Raises CheckpointError: the profile is of a model of another shape."""
        path = Path(self.profile) / "profile.json"
        try:
            info = read_json(path)
            found = {name: info[name] for name in ("layers", "E", "D")}
        except (ConfigError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is no profile of moe-edge profile_model: "
                f"{type(error).__name__}: {error}"
            ) from error
        config = self.config
        wanted = {"layers": list(config.moe_layers), "E": config.moe.num_experts}
        wanted["D"] = config.d_model
        if found != wanted:
            raise CheckpointError(
                f"{path} is of a model with {found}, this one has {wanted}; run "
                "moe-edge profile_model on it"
            )

    @functools.cached_property
    def _probes(self) -> dict[int, tuple[Flat, ...]]:
        """By layer, one for each target.

        Raises:
          CheckpointError: numbers of neurons that differ.
        """
        probes = {
            layer: tuple(self._read(layer, target) for target in self.targets(layer))
            for layer in self.config.moe_layers
        }
        found = {one["probe_out"].shape[1] for each in probes.values() for one in each}
        if len(found) > 1:
            raise CheckpointError(
                f"probes of {self.profile} have {sorted(found)} neurons, expected one "
                "number; run moe-edge profile_model again"
            )
        return probes

    def _read(self, layer: int, target: int) -> Flat:
        """Rows of experts, gates of neurons and their rows `[E + 2 N, D]`, what neurons
        add `[E, N]`, and constants.

        Raises:
          CheckpointError: no such probe, or of another model.
        """
        E, C = self.config.moe.num_experts, self.config.d_model + 1
        rows_EC = self._load(probe_path(self.profile, layer, target), C, E)
        neurons = neurons_path(self.profile, layer, target)
        neurons_NX = self._load(neurons, 2 * C + E)
        gate_NC, up_NC = neurons_NX[:, :C], neurons_NX[:, C : 2 * C]
        read_RC = np.concatenate([rows_EC, gate_NC, up_NC])
        return {
            "probe": read_RC[:, :-1].copy(),
            "probe_bias": read_RC[:, -1].copy(),
            "probe_out": neurons_NX[:, 2 * C :].T.copy(),
        }

    def _load(self, path: Path, width: int, length: int | None = None) -> np.ndarray:
        """A file of a probe; of any length, if None is given."""
        again = f"run moe-edge profile_model with --probes {self.look_ahead}"
        if not path.is_file():
            raise CheckpointError(
                f"{path} cannot be found: the profile looks less far ahead, or is of "
                f"an earlier version, without neurons; {again}"
            )
        try:
            array = load_npy(path)
        except (OSError, ValueError, EOFError, OverflowError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; {again}") from error
        is_probe = array.ndim == 2 and array.dtype == np.float32 and len(array) > 0
        if not is_probe or array.shape != (length or len(array), width):
            raise CheckpointError(
                f"{path} holds {array.dtype} {array.shape}, expected float32 "
                f"({length or 'any number'}, {width}): is the profile of this model?"
            )
        if not np.isfinite(array).all():
            raise CheckpointError(f"{path} holds values that are not finite; {again}")
        return array

    @functools.cached_property
    def _on_device(self) -> dict[int, tuple[Flat, ...]]:
        import jax

        return jax.tree.map(jax.numpy.array, self._probes)

    def gates_after(self, layer: int) -> tuple[Flat, ...]:
        """Arguments of `scores_ahead` after `layer`: a probe for each target."""
        return self._on_device.get(layer, ())
