"""What made two prompts part: the culprit that is named, and the text that is shown."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.wire.culprits import ADVICE, SHOWN, SHOWN_AFTER, SHOWN_BEFORE, Culprit, explain_difference
from trunkline.wire.records import DiffRow

REST = " and from here on everything is the same again, as it should have been from the start."


def explain(before: str, was: str, now: str, was_tokens: int = 1000, now_tokens: int = 1000) -> DiffRow:
    return explain_difference(
        run="r", at_token=7, before=before, was=was, now=now, was_tokens=was_tokens, now_tokens=now_tokens
    )


def tools(*names: str) -> str:
    return json.dumps([{"function": {"name": name, "description": "Does things.", "parameters": {}}} for name in names])


BILLING = "<|im_start|>system\nx-anthropic-billing-header: cc_version=2.1.104."


@pytest.mark.parametrize(
    ("culprit", "before", "was", "now"),
    [
        (Culprit.BILLING, BILLING + "583; cch=", "1f3a9;\nYou", "22bcd;\nYou"),
        (Culprit.BILLING, BILLING, "583; cch=1f3a9;\nYou", "264; cch=1f3a9;\nYou"),
        (Culprit.TIMESTAMP, "Today is 2026-11-", "29.", "30."),
        (Culprit.TIMESTAMP, "It is ", "9:10 AM", "11:20 PM"),
        (Culprit.TIMESTAMP, "Mon, ", "30 Nov 2026 09:10:05 GMT", "29 Nov 2026 09:10:05 GMT"),
        (Culprit.TIMESTAMP, "now=179", "6029805.5 ", "7029805.5 "),
        (
            Culprit.IDENTIFIER,
            "session ",
            "123e4567-e89b-12d3-a456-426614174000",
            "00000000-e89b-12d3-a456-426614174000",
        ),
        (Culprit.IDENTIFIER, "commit ", "deadbeef1", "f00dfeed2"),
        (Culprit.IDENTIFIER, "in dir-", "x9Kq2LmZp0a/", "Ab3dEf9hIjK/"),
        (Culprit.NUMBER, "You have used ", "1,204 tokens", "988 tokens"),
        (Culprit.WHITESPACE, "Be brief.", "\n\nAnswer in English.", " Answer in English."),
        (Culprit.WHITESPACE, "Be brief.", "Answer", "\nAnswer"),
        (Culprit.TOOL_ORDER, "# Tools\n", tools("read", "write", "bash"), tools("bash", "read", "write")),
        (Culprit.TOOL_ORDER, "# Tools\n" + tools("read")[:-1], tools("write", "bash"), tools("bash", "write")),
        (Culprit.JSON_KEYS, '{"', 'path": "a", "limit": 2}', 'limit": 2, "path": "a"}'),
        (Culprit.JSON_KEYS, '{"type": "object", "', 'x": {"a": 1}, "y": 2}', 'y": 2, "x": {"a": 1}}'),
        (Culprit.EDITED, "The answer is ", "yes, always", "no, never"),
        (Culprit.EDITED, '{"path": "', 'a", "limit": 2}', 'b", "limit": 2}'),
        (Culprit.TOKENS, "The answer is ", "yes", "yes, always"),
    ],
)
def test_a_culprit_is_named_by_what_stands_where_the_texts_part(
    culprit: Culprit, before: str, was: str, now: str
) -> None:
    assert explain(before, was, now).culprit == culprit


def test_a_history_that_became_much_shorter_was_compacted() -> None:
    texts = ("He said: ", "first, I read the file", "Summary of what was done")
    assert explain(*texts, was_tokens=9000, now_tokens=700).culprit == Culprit.COMPACTION
    assert explain(*texts, was_tokens=300, now_tokens=20).culprit == Culprit.EDITED
    assert explain(*texts, was_tokens=9000, now_tokens=8000).culprit == Culprit.EDITED


def test_only_what_differs_is_marked_and_what_follows_on_both_sides_is_shown() -> None:
    row = explain("You are an agent. ", f"It is noon.{REST}", f"It is midnight.{REST}")
    assert (row.before, row.was, row.now) == ("You are an agent. It is ", "noon", "midnight")
    assert row.after == f".{REST}"[:SHOWN_AFTER]


def test_texts_that_stay_apart_are_shown_from_where_they_part() -> None:
    row = explain("Say ", "one two three four five", "six seven eight nine ten")
    assert (row.was, row.now, row.after) == ("one two three four five", "six seven eight nine ten", "")


def test_long_texts_are_cut() -> None:
    row = explain("b" * 1000, "was " + "w " * 1000, "now " + "n " * 1000)
    assert (len(row.before), len(row.was), len(row.now), row.after) == (SHOWN_BEFORE, SHOWN, SHOWN, "")


def test_every_culprit_comes_with_advice() -> None:
    assert set(ADVICE) == set(Culprit)


texts: Any = st.text() | st.lists(st.sampled_from(['{"name": "', '", ', "\n", " ", "12:30", "cch=", "a", "x1"])).map(
    "".join
)


@given(before=texts, was=texts.filter(bool), now=texts.filter(bool))
def test_any_two_texts_are_explained_and_what_is_shown_is_theirs(before: str, was: str, now: str) -> None:
    row = explain(before, was, now)
    assert row.was in was
    assert row.now in now
    assert (before + was).find(row.before + row.was) >= 0
    assert (before + now).find(row.before + row.now + row.after) >= 0
