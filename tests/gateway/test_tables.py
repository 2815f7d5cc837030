"""The tables that `trunkline runs` and `trunkline run ID` print."""

import msgspec

from tests.gateway.scripted import make_row
from trunkline.wire.records import DiffRow, MissRow, RunRow, RunTotals, RunView
from trunkline.wire.tables import diff_text, moment, percent, run_table, runs_table, table, turns_table

NEVER_SEEN = MissRow(reason="never_seen", tokens=1200)


def make_view(**changes: object) -> RunView:
    fields: dict[str, object] = {
        "id": "fix-7",
        "parent": "main",
        "children": ("fix-7a", "fix-7b"),
        "state": "waiting",
        "origin": "header",
        "node": "embedded",
        "started_at": 0.0,
        "last_at": 60.0,
        "turns": (
            make_row(
                prompt_tokens=1200,
                cached_tokens=0,
                novel_tokens=1200,
                misses=(NEVER_SEEN,),
            ),
            make_row(index=1, tool_gap_ms=480.4, misses=(MissRow(reason="evicted", tokens=6, detail="decision 3"),)),
        ),
        "totals": RunTotals(turns=2, prompt_tokens=1210, cached_tokens=1209, reusable_tokens=1209, completion_tokens=6),
    }
    return RunView(**(fields | changes))  # type: ignore[arg-type]


def test_numbers_align_right_and_text_left() -> None:
    assert table(("name", "n"), [("a", "1"), ("long name", "1,000")]) == (
        "name           n\n---------  -----\na              1\nlong name  1,000"
    )


def test_a_run_is_shown_turn_by_turn_with_reasons_and_sums() -> None:
    text = run_table(make_view(name="fix the build", objective="green"))
    head, branch_of, branches, objective, span, _, header, _, first, second, _, sums = text.splitlines()
    assert head == "run fix-7 (fix the build): waiting, on embedded, named by header"
    assert (branch_of, branches, objective) == ("branch of main", "branches: fix-7a, fix-7b", "objective: green")
    assert span == f"from {moment(0)} to {moment(60)}"
    assert header.split()[:5] == ["turn", "prompt", "cached", "novel", "out"]
    assert first.split() == [
        "0",
        "1,200",
        "0",
        "1,200",
        "3",
        "-",
        "1",
        "2",
        "3",
        "6",
        "stop",
        "-",
        "1,200",
        "never_seen",
    ]
    assert second.endswith("stop  -         6 evicted (decision 3)")
    assert "480" in second
    assert sums.startswith("2 turns, 1,210 prompt tokens, 1,209 cached (99% of the prompts, 100% of what was reusable)")


def test_a_footnote_says_what_of_a_prompt_was_normalized() -> None:
    noted = make_row(index=1, normalized={"dates": 2, "billing": 1})
    text = run_table(make_view(turns=(make_row(), noted)))
    assert text.splitlines()[-4:-1] == ["", "turn 1: normalized billing (1), dates (2)", ""]


def test_a_footnote_says_what_a_relation_rests_on() -> None:
    turn = make_row(index=1, relation="compaction", shared_tokens=1200, passages=14)
    *_, line, _, note, _, _ = run_table(make_view(session="s", turns=(make_row(), turn))).splitlines()
    assert line.split()[11] == "compaction"
    assert note.startswith("turn 1: compaction: 1,200 tokens in front were known, and 14 passages")
    assert "in session s" in run_table(make_view(session="s"))
    assert "in session" not in run_table(make_view(session="fix-7"))


def test_a_run_without_turns_is_shown_too() -> None:
    text = run_table(make_view(turns=(), totals=RunTotals(), parent=None, children=(), node=""))
    assert "no turns yet" in text
    assert "no node yet" in text


def test_runs_are_listed_a_line_each() -> None:
    run = RunRow(
        id="a",
        parent=None,
        state="active",
        origin="header",
        node="embedded",
        started_at=0.0,
        last_at=60.0,
        turns=3,
        prompt_tokens=3000,
        cached_tokens=1500,
        reusable_tokens=2000,
        completion_tokens=12,
    )
    header, _, line = runs_table([run]).splitlines()
    assert header.split()[:4] == ["run", "state", "turns", "prompt"]
    assert line.split()[:8] == ["a", "active", "3", "3,000", "1,500", "50%", "75%", "12"]
    assert runs_table([]) == "no runs yet"


def test_only_everything_is_100_percent() -> None:
    assert (percent(999, 1000), percent(1000, 1000), percent(0, 0)) == ("99%", "100%", "-")


def test_what_clients_wrote_cannot_steer_the_terminal() -> None:
    text = run_table(make_view(name="\x1b[2J", objective="a\nb"))
    assert "\x1b" not in text
    assert "objective: a\ufffdb" in text


def test_a_difference_is_shown_with_its_culprit_and_what_helps() -> None:
    diff = DiffRow(
        run="main",
        at_token=1214,
        before="<|im_start|>system\nx-anthropic-billing-header: cch=",
        was="1f3a9",
        now="22\x1bcd",
        after=";\nYou are",
        was_tokens=3301,
        now_tokens=3400,
        culprit="billing",
    )
    view = make_view(turns=(make_row(diff=diff), make_row(index=1)))
    assert diff_text(view, view.turns[0]).splitlines() == [
        "turn 0 left run main at token 1,214: 3,301 tokens went on there, 3,400 go on now",
        "likely culprit: billing (a billing token; `--normalize billing` holds it still)",
        "",
        "   <|im_start|>system\\nx-anthropic-billing-header: cch=",
        " - 1f3a9",
        " + 22\ufffdcd",
        "   ;\\nYou are",
    ]
    assert diff_text(view, view.turns[1]) == "turn 1 left no prefix that it should have shared"
    own = make_row(diff=msgspec.structs.replace(diff, run="fix-7", after=""))
    assert diff_text(view, own).startswith("turn 0 left its run's own history at token")
    assert diff_text(view, own).endswith("   (they do not go on alike within what is kept)")


def test_forced_tokens_have_a_column_where_a_grammar_forced_any() -> None:
    plain, forced = make_row(), make_row(index=1, constraint="tool_call", forced_tokens=1234)
    assert "forced" not in turns_table((plain,))
    header, _, *lines = turns_table((plain, forced)).splitlines()
    at = header.split().index("forced")
    assert [line.split()[at] for line in lines] == ["0", "1,234"]
    assert header.split()[at - 1 : at + 2] == ["out", "forced", "gap"]
