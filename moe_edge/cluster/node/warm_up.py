"""Compiles all that a server may run, before anything is timed and without others.

Every shape of prompt runs with all blocks here, with some elsewhere and with all
elsewhere; this server answers its own calls, from one slot, so values mean nothing.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.engine import PlacedEngine
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.remote import Outgoing, Remote
from moe_edge.cluster.node.tables import HERE, Tables, View
from moe_edge.engine import generate
from moe_edge.engine.base import Engine


class _Rehearsal(Remote):
    """Answers its own calls as if slot 0 held every block."""

    def _rows(self, each: Outgoing) -> np.ndarray:
        return self._answers.rehearse(each.call)


class _Actor(PlacedEngine):
    """Finds blocks elsewhere whatever a layer chooses.

    Attributes:
      away_of: bool [E], which blocks are elsewhere, of the chosen [T, K].
    """

    away_of: Callable[[np.ndarray], np.ndarray]

    def _layer_view(self, layer: int, ids_TK: np.ndarray) -> View:
        shape = self.config.num_layers, self.config.moe.num_experts
        self._away_E = self.away_of(ids_TK)
        return _view(shape, self._away_E, self.holdings.nowhere)

    def _here(self, layer, routed, ids_TK, slot_of, parts, size):
        """Some are here, even if all tokens chose the one block that is elsewhere."""
        if not self._away_E.all():
            return self._rows_here(routed, slot_of)
        return super()._here(layer, routed, ids_TK, slot_of, parts, size)


def warm_up(
    engine: PlacedEngine, answers: Answers, sizes: Iterable[tuple[int, int]]
) -> None:
    """Compiles what requests of these sizes need.

    Args:
      sizes: (tokens of the prompt, most new tokens) of every request to come.
    """
    for prompt, new in different(sizes):
        for actor in actors(engine, answers):
            actor.ledger.token(0, False)
            run_request(actor, prompt, new)


def actors(
    engine: PlacedEngine, answers: Answers, ledger_kind: type[Ledger] = Ledger
) -> Iterator[PlacedEngine]:
    """Engines of the same programs: blocks are all here, some elsewhere, or all."""
    config = engine.config
    shape = config.num_layers, config.moe.num_experts
    ledger = ledger_kind(0, 1, shape)
    tables = Tables(0, engine.holdings)
    rehearsal = _Rehearsal(0, None, answers, tables, ledger)
    actor = _Actor(engine.weights, engine.holdings, rehearsal, ledger, engine.programs)
    for actor.away_of in _distributions(shape[1]):
        yield actor


def run_request(engine: Engine, prompt: int, new: int) -> None:
    """Compiles what a request of so many tokens runs: the programs of `generate`."""
    # Different tokens: an engine with few slots takes other programs for many experts.
    varied = (np.arange(prompt) % engine.config.vocab_size).tolist()
    generate.warm_up(engine, [varied], new)


def different(sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """One (tokens of the prompt, most new tokens) of each shape among some."""
    return list(
        {generate.shape_of([range(n)], new): (n, new) for n, new in sizes}.values()
    )


def _distributions(num_experts: int) -> list[Callable[[np.ndarray], np.ndarray]]:
    """Which blocks are elsewhere: none, one of those of the first token, all."""
    block_E = np.arange(num_experts)
    return [
        lambda _: np.zeros(num_experts, bool),
        lambda ids_TK: block_E == ids_TK[0, 0],
        lambda _: np.ones(num_experts, bool),
    ]


def _view(shape: tuple[int, int], away_E: np.ndarray, nowhere: int) -> View:
    asked_E1 = np.append(np.where(away_E, 0, HERE), HERE).astype(np.int16)
    slot_E1 = np.append(np.where(away_E, nowhere, 0), nowhere).astype(np.int32)
    asked_LE, slot_LE = (
        np.tile(asked_E1, (shape[0], 1)),
        np.tile(slot_E1, (shape[0], 1)),
    )
    here_L = np.full(shape[0], not away_E.any())
    return View(0, np.zeros_like(asked_LE), asked_LE, slot_LE, here_L)
