"""Tables of policies in the documentation."""

from pathlib import Path

import pytest

from moe_edge.commands import policy_tables
from moe_edge.commands.policy_tables import KINDS, PAGES, main, names, up_to_date
from moe_edge.core.checks import ConfigError
from moe_edge.place.placer import PLACERS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_page_is_up_to_date(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    said = f"{page} is old: run python -m moe_edge.commands.policy_tables"
    assert up_to_date(text) == text, said


def test_plug_ins_has_a_table_of_every_kind():
    text = (ROOT / "docs/plug_ins.md").read_text(encoding="utf-8")
    for kind, registry in KINDS.items():
        assert f"<!-- policies {kind} -->\n| name |" in text
        assert all(f"| `{name}` |" in text for name in registry)


def test_old_table_and_list_are_written_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policy_tables, "PAGES", ("P.md", "Q.md"))
    with pytest.raises(ConfigError, match="no P.md here; run this in the root of a cl"):
        main()
    Path("Q.md").write_text("nothing\n")
    Path("P.md").write_text(
        "| a | <!-- policies placer -->before<!-- end --> |\n"
        "<!-- policies route -->\n| before |\n<!-- end -->\n"
    )
    main()
    text = Path("P.md").read_text()
    assert f"-->{names(PLACERS)}<!--" in text and "before" not in text
    assert "| `drop` | Drops absent experts with less than" in text
    assert "| `threshold=0.05`, `renormalise=True` |" in text
    assert capsys.readouterr().out == "P.md\n"
    main()
    assert capsys.readouterr().out == ""
    assert "oracle" not in names(KINDS["predictor"]), "replay only"


def test_unknown_kind_is_refused():
    with pytest.raises(
        ConfigError, match="'rout'; did you mean 'route'. known: assist, evict"
    ):
        up_to_date("<!-- policies rout -->x<!-- end -->")
