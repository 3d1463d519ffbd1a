"""Blocks asked for ahead of need: what the predictor names, as far as there is room."""

from moe_edge.offload.residency import Residency
from moe_edge.predict.predictor_run import PredictorRun


class Prefetcher:
    """Asks for what coming layers are expected to choose, `limit` blocks a lookup."""

    def __init__(self, residency: Residency, run: PredictorRun, limit: int):
        self._residency, self.run, self.limit = residency, run, limit
        # Else the engine asks, as soon as it has computed such a state.
        self.follows_routing = "partial_state" not in run.predictor.needs
        self.follows_routing &= not run.is_idle

    def prefetch(self, layer: int, step: int) -> None:
        """Asks for what the predictor expects of the next layers, nearest first."""
        ids_NM = self.run.predict(layer)
        if not ids_NM.size:
            return
        self._ask(ids_NM.tolist(), layer, step)

    def _ask(self, ids_NM: list[list[int]], layer: int, step: int) -> None:
        residency, blocks = self._residency, []
        pins, cache = residency.pins, residency.cache
        E, L = residency.spec.num_experts, residency.spec.num_layers
        left, kept, expected = self.limit, pins.kept(), pins.expected
        for ahead, ids in enumerate(ids_NM):
            target = (layer + 1 + ahead) % L
            # Half of the room at most: the layer's own misses need the rest.
            spare_N = [
                room // 2 - pins.count_expected(target, home)
                for home, room in enumerate(cache.rooms(target))
            ]
            row = cache.rows[target]
            for expert in ids:
                if left <= 0 or max(spare_N) <= 0:
                    break
                if expert < 0:
                    continue
                home = cache.room_of(target, expert)
                if spare_N[home] <= 0:
                    continue
                slot = row[expert]
                if slot < 0:
                    slot = cache.admit(target, expert, kept)
                    if slot is None:
                        spare_N[home] = 0
                        continue
                    blocks.append((target, expert, slot))
                    left, spare_N[home] = left - 1, spare_N[home] - 1
                # One that is here already stays until its layer has run.
                key = target * E + expert
                if expected.get(key) != slot:
                    pins.expect(key, slot)
                    kept.add(slot)
        residency.ask(blocks, "prefetch", step)
