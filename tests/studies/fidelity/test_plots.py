import pytest

from moe_edge.studies.fidelity import plots as plots


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def cards(kinds):
    fidelity = {
        "agreement": 0.9,
        "agreement_interval95": (0.8, 0.95),
        "perplexity_ratio": 1.1,
        "ratio_interval95": (1.0, 1.2),
    }
    half = {"option": "4 of 8 experts", "control": True, "batch": 1}
    rows = [half | fidelity]
    for budget in ("25%", "50%"):
        for batch in (1, 3):
            at = {"control": False, "batch": batch, "device_memory": budget}
            if "substitute" in kinds:
                rule = {"weights": "own", "renormalise": True}
                for a in (0.1, 0.2):
                    rows.append({"option": "substitute", "a": a, **rule, **at})
            if "drop" in kinds:
                rule = {"threshold": 0.1, "renormalise": False}
                rows.append({"option": "drop", **rule, **at})
            rows[1:] = [row | fidelity for row in rows[1:]]
    return rows


@pytest.mark.parametrize("kinds", [("substitute", "drop"), ("drop",), ("substitute",)])
def test_fidelity_curves_writes_a_row_a_kind(tmp_path, kinds):
    plots.fidelity_curves(tmp_path / "p.png", cards(kinds), title="t")
    width, height = png_size(tmp_path / "p.png")
    assert width > 900 and height > 600 * len(kinds)
