"""Reads what `/metrics` answers."""

from prometheus_client.parser import text_string_to_metric_families

from moe_edge.schedule.policy import OUTCOMES


class Reading:
    """An answer; names are without the prefix."""

    def __init__(self, text: str):
        self.text = text
        self.families = {f.name: f for f in text_string_to_metric_families(text)}

    def samples(self, name: str, suffix: str = "") -> dict[tuple, float]:
        """Label values -> value."""
        family = self.families["moe_edge_" + name]
        wanted = family.name + (
            suffix or ("_total" if family.type == "counter" else "")
        )
        return {
            tuple(each.labels.values()): each.value
            for each in family.samples
            if each.name == wanted
        }

    def value(self, name: str, suffix: str = "") -> float:
        (value,) = self.samples(name, suffix).values()
        return value

    def outcomes(self) -> dict[str, float]:
        found = dict.fromkeys(OUTCOMES, 0)
        for (_, outcome), value in self.samples("requests").items():
            found[outcome] += value
        return found
