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


def test_accuracy_over_a_writes_a_panel_a_set(tmp_path):
    tasks = [
        {"task": task, "a": a, "accuracy": 0.4, "interval95": (0.3, 0.5), "chance": 0.5}
        for task in ("one", "two", "three")
        for a in (0.0, 0.1)
    ]
    fidelity = [
        row | {"a": a} for a, row in zip((0.0, 0.1), cards(("drop",)), strict=False)
    ]
    plots.accuracy_over_a(tmp_path / "p.png", tasks, fidelity, title="t")
    assert min(png_size(tmp_path / "p.png")) > 400


@pytest.mark.parametrize("a", [0.15, None])
def test_tpot_over_a_writes_a_picture_without_a_choice_too(tmp_path, a):
    points = [
        {
            "batch": batch,
            "a": value,
            "tpot_s": [0.01, 0.02],
            "agreement": 0.9,
            "agreement_interval95": (0.8, 1.0),
        }
        for batch in (1, 3)
        for value in (0.0, 0.3)
    ]
    fits = [
        {"batch": b, "coefficients": [0.02, -0.01], "a": a, "budget_tpot_s": 0.015}
        for b in (1, 3)
    ]
    plots.tpot_over_a(tmp_path / "p.png", points, fits, title="t")
    assert min(png_size(tmp_path / "p.png")) > 400
