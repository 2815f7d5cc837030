"""Who owns a turn: precedence of headers and fields, and what keys may see."""

import pytest

from trunkline.core.types import RunOrigin
from trunkline.gateway.errors import InvalidRequest
from trunkline.gateway.identity import (
    FINAL_HEADERS,
    PARENT_HEADERS,
    SESSION_HEADERS,
    identify,
    key_scope,
    salt_of,
    scope_of,
    session_of_user,
)


def test_our_header_names_the_run_whatever_else_names_a_session() -> None:
    hint = identify({"x-trunkline-run": "ours", "x-session-id": "session"}, session_id="body")
    assert (hint.run, hint.group, hint.origin) == ("ours", None, RunOrigin.HEADER)


def test_a_run_id_in_the_metadata_names_the_run_whatever_else_names_a_session() -> None:
    hint = identify({"x-session-id": "session"}, metadata={"run_id": "c", "other": 1})
    assert (hint.run, hint.group, hint.origin) == ("c", None, RunOrigin.BODY)


@pytest.mark.parametrize("at", range(len(SESSION_HEADERS) - 1))
def test_an_earlier_session_header_wins_over_a_later_one(at: int) -> None:
    hint = identify({SESSION_HEADERS[at]: "first", SESSION_HEADERS[at + 1]: "second"}, prompt_cache_key="body")
    assert (hint.run, hint.group, hint.origin) == (None, "first", RunOrigin.SESSION)


CODING_AGENT = {"user_id": "user_1_account_2_session_d"}


@pytest.mark.parametrize(
    ("fields", "group"),
    [
        ({"session_id": "a", "prompt_cache_key": "b", "metadata": CODING_AGENT}, "a"),
        ({"prompt_cache_key": "b", "metadata": CODING_AGENT}, "b"),
        ({"metadata": CODING_AGENT}, "d"),
    ],
)
def test_body_fields_name_a_session_when_no_header_does(fields: dict[str, object], group: str) -> None:
    hint = identify({}, **fields)  # type: ignore[arg-type]
    assert (hint.run, hint.group, hint.origin) == (None, group, RunOrigin.BODY)


@pytest.mark.parametrize("headers", [{}, {"x-session-id": "", "x-trunkline-run": ""}])
def test_a_request_that_names_nothing_is_inferred(headers: dict[str, str]) -> None:
    hint = identify(headers, session_id="", metadata={})
    assert (hint.run, hint.parent, hint.origin, hint.final) == (None, None, RunOrigin.INFERRED, False)


@pytest.mark.parametrize("header", PARENT_HEADERS)
def test_a_parent_may_be_named_with_every_parent_header(header: str) -> None:
    assert identify({"x-session-id": "child", header: "parent"}).parent == "parent"


@pytest.mark.parametrize("header", FINAL_HEADERS)
@pytest.mark.parametrize(("value", "final"), [("true", True), ("1", True), ("Yes", True), ("0", False), ("no", False)])
def test_a_turn_may_be_declared_final(header: str, value: str, final: bool) -> None:
    assert identify({header: value}).final is final


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-trunkline-run": "x" * 257}, "x-trunkline-run"),
        ({"x-trunkline-run": "tab\there"}, "x-trunkline-run"),
        ({"x-session-id": "caf\xe9"}, "x-session-id"),
        ({"x-trunkline-run": "same", "x-trunkline-run-parent": "same"}, "x-trunkline-run-parent"),
        ({"x-session-id": "same", "x-dynamo-parent-session-id": "same"}, "x-dynamo-parent-session-id"),
        ({"x-trunkline-run-final": "perhaps"}, "x-trunkline-run-final"),
    ],
)
def test_an_unusable_header_is_refused_by_name(headers: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        identify(headers)
    assert refusal.value.param == param
    assert param in refusal.value.message


def test_an_id_of_256_printable_characters_with_spaces_inside_is_accepted() -> None:
    run = ("a b/" * 64)[:256]
    assert identify({"x-trunkline-run": run}).run == run


def test_metadata_run_id_must_be_a_string() -> None:
    with pytest.raises(InvalidRequest, match=r"metadata\.run_id"):
        identify({}, metadata={"run_id": 7})


def test_a_scope_is_stable_and_hides_its_key() -> None:
    assert key_scope("sk-secret") == key_scope("sk-secret") != key_scope("sk-other")
    assert "secret" not in key_scope("sk-secret")


def test_a_cache_salt_isolates_inside_its_scope() -> None:
    scope = key_scope("sk-a")
    salts = {salt_of(scope, None), salt_of(scope, "x"), salt_of(scope, "y"), salt_of("", "x")}
    assert len(salts) == 4
    assert scope_of(salt_of(scope, "x")) == scope
    assert scope_of(salt_of("", "x")) == ""


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ("user_0a1b_account_9f-2_session_3f2504e0-4f89-11d3-9a0c-0305e82c3301", "3f2504e0-4f89-11d3-9a0c-0305e82c3301"),
        ('{"device_id": "d", "account_uuid": "", "session_id": "3f25-04e0"}', "3f25-04e0"),
        ("user_0a1b_account__session_", None),
        ("somebody", None),
        ('{"session_id": 7}', None),
        ('{"session_id": "caf\xe9"}', None),
        ('["session_id"]', None),
        ("\ud800", None),
        (7, None),
        (None, None),
    ],
)
def test_a_session_is_read_out_of_a_coding_agents_user_id(user_id: object, session: str | None) -> None:
    assert session_of_user(user_id) == session
