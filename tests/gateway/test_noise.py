"""Client noise held still: which pieces, by whose values, and that nothing else is touched."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.conftest import Serve, Served
from trunkline.gateway.noise import MAX_JSON_CHARACTERS, SCOPE_BYTES, FirstSeen, NoiseFilter
from trunkline.wire.noise import DATE, Normalizer
from trunkline.wire.openai import ContentPart, Message

BILLING = "x-anthropic-billing-header: cc_version=2.1.104.{}; cc_entrypoint=sdk-cli; cch={};\nYou are {}.\ncch={};"


def agent(build: str, cch: str, who: str = "an agent") -> list[Message]:
    return [
        Message(role="system", content=BILLING.format(build, cch, who, cch)),
        Message(role="user", content=f"what does cch={cch}; mean?"),
    ]


def texts(filtered: NoiseFilter, messages: list[Message], salt: str = "") -> list[Any]:
    return [message.content for message in filtered.settle(salt, messages, None).messages]


# --- billing ----------------------------------------------------------------------------------------------------------


def test_billing_tokens_in_the_first_line_of_the_system_prompt_keep_their_first_value() -> None:
    noise = NoiseFilter([Normalizer.BILLING])
    first = noise.settle("", agent("583", "aaaaa"), None)
    second = noise.settle("", agent("264", "bbbbb"), None)
    assert first.messages == agent("583", "aaaaa")
    assert first.normalized == {}
    assert second.messages[0].content == BILLING.format("583", "aaaaa", "an agent", "bbbbb")
    assert second.messages[1] == agent("264", "bbbbb")[1]
    assert second.normalized == {"billing": 2}


def test_agents_whose_prompts_differ_later_still_share_the_billing_line() -> None:
    noise = NoiseFilter([Normalizer.BILLING])
    texts(noise, agent("583", "aaaaa"))
    (other, _) = texts(noise, agent("583", "bbbbb", "another agent"))
    assert other == BILLING.format("583", "aaaaa", "another agent", "bbbbb")


def test_a_value_is_not_shared_with_a_prompt_that_differs_before_it() -> None:
    noise = NoiseFilter([Normalizer.BILLING])
    texts(noise, agent("583", "aaaaa"))
    newer = [Message(role="system", content=agent("583", "bbbbb")[0].content.replace("2.1.104", "2.1.105"))]  # type: ignore[union-attr]
    assert texts(noise, newer) == [newer[0].content]


@pytest.mark.parametrize(
    "messages",
    [
        [Message(role="user", content="x-anthropic-billing-header: cch={};")],
        [Message(role="system", content="Be brief.\nx-anthropic-billing-header: cch={};")],
        [
            Message(role="system", content="first"),
            Message(role="system", content="x-anthropic-billing-header: cch={};"),
        ],
        [Message(role="system", content="cch={}; x-anthropic-billing-header:")],
        [Message(role="system", content="x-anthropic-billing-header: id={};")],
    ],
    ids=["a user's", "second line", "second message", "another line", "not listed"],
)
def test_what_is_not_a_listed_token_at_its_place_is_left_alone(messages: list[Message]) -> None:
    noise = NoiseFilter([Normalizer.BILLING])
    for value in ("aaaaa", "bbbbb"):
        sent = [Message(role=m.role, content=m.content.replace("{}", value)) for m in messages]  # type: ignore[union-attr]
        settled = noise.settle("", sent, None)
        assert (settled.messages, settled.normalized) == (sent, {})


def test_text_parts_are_settled_like_text() -> None:
    noise = NoiseFilter([Normalizer.BILLING])

    def parts(cch: str) -> list[Message]:
        line = ContentPart("text", f"x-anthropic-billing-header: cch={cch};")
        return [Message(role="system", content=[line, ContentPart("text", f"x-anthropic-billing-header: cch={cch};")])]

    texts(noise, parts("aaaaa"))
    ((first, second),) = texts(noise, parts("bbbbb"))
    assert (first.text[-7:], second.text[-7:]) == ("=aaaaa;", "=bbbbb;")


def test_values_stay_in_their_salt() -> None:
    noise = NoiseFilter([Normalizer.BILLING])
    for salt in ("key-1", "key-1/tenant", "key-2"):
        sent = agent("583", f"seen-by-{salt[-1]}")
        assert texts(noise, sent, salt) == [message.content for message in sent]


def test_a_switched_off_normalizer_changes_nothing() -> None:
    noise = NoiseFilter([])
    tools = [{"function": {"name": "a"}}, {"function": {"name": "b"}}]
    for cch, order in (("aaaaa", tools), ("bbbbb", tools[::-1])):
        sent = agent("583", cch)
        settled = noise.settle("", sent, order)
        assert (settled.messages, settled.tools, settled.normalized) == (sent, order, {})


def test_memory_of_a_scope_is_bounded_and_its_own() -> None:
    seen = FirstSeen(10_000)
    seen.value("quiet", b"place", "first")
    for at in range(1000):
        seen.value("loud", at.to_bytes(4), "x" * 100)
        assert seen.held_bytes("loud") <= 10_000
    assert seen.value("loud", (0).to_bytes(4), "new") == "new"
    assert seen.value("loud", (999).to_bytes(4), "new") != "new"
    assert seen.value("quiet", b"place", "later") == "first"


# --- dates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "date",
    [
        "2026-11-30",
        "2026-11-30T09:10:05Z",
        "2026-11-30 09:10:05.123456+00:00",
        "2026/11/30",
        "11/30/2026",
        "30.11.2026",
        "30.11.2026 09:10",
        "November 30, 2026",
        "Monday, November 30, 2026 at 9:10 AM",
        "Nov 30th 2026",
        "30 Nov 2026",
        "Mon, 30 Nov 2026 09:10:05 GMT",
        "Mon Nov 30 09:10:05 UTC 2026",
        "09:10",
        "9:10 p.m.",
        "23:59:59.999",
        "1796029805",
        "1796029805123",
    ],
)
def test_dates_and_times_are_found_whole(date: str) -> None:
    assert [match[0] for match in DATE.finditer(f"Today is {date} and all is well")] == [date]
    assert [match[0] for match in DATE.finditer(f"({date}), ")] == [date]


@pytest.mark.parametrize(
    "text",
    [
        "version 1.2.3",
        "10.0.0.1:8080",
        "ratio 16:90",
        "v2026-11-30x",
        "12345",
        "a/2026-11-30/b",
        "May be",
        "1:2:3",
        "::1",
    ],
)
def test_what_is_no_date_is_not_taken_for_one(text: str) -> None:
    assert [match[0] for match in DATE.finditer(text)] == []


def test_dates_of_system_prompts_keep_their_first_value_where_all_before_is_the_same() -> None:
    noise = NoiseFilter([Normalizer.DATES])

    def sent(place: str, day: str, clock: str) -> list[Message]:
        return [
            Message(role="system", content=f"You work in {place}. Today is {day}."),
            Message(role="developer", content=f"It is {clock}."),
            Message(role="user", content=f"Is it {clock} on {day}?"),
        ]

    texts(noise, sent("Oslo", "2026-11-29", "09:10"))
    later = noise.settle("", sent("Oslo", "2026-11-30", "10:20"), None)
    assert [message.content for message in later.messages] == [
        "You work in Oslo. Today is 2026-11-29.",
        "It is 09:10.",
        "Is it 10:20 on 2026-11-30?",
    ]
    assert later.normalized == {"dates": 2}
    elsewhere = sent("Rome", "2026-11-30", "10:20")
    assert texts(noise, elsewhere) == [message.content for message in elsewhere]


# --- order ------------------------------------------------------------------------------------------------------------


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def test_a_tool_list_keeps_the_order_in_which_the_same_tools_came_first() -> None:
    noise = NoiseFilter([Normalizer.TOOL_ORDER])
    read, write, bash = tool("read"), tool("write"), tool("bash")
    noise.settle("", [], [read, write, bash])
    again = noise.settle("", [], [bash, read, write])
    assert (again.tools, again.normalized) == ([read, write, bash], {"tool_order": 1})
    fewer = noise.settle("", [], [bash, read])
    assert (fewer.tools, fewer.normalized) == ([bash, read], {})
    twice = noise.settle("", [], [bash, read, read])
    assert twice.tools == [bash, read, read]
    assert noise.settle("", [], [read, bash, read]).tools == [bash, read, read]


def test_key_order_does_not_matter_where_tools_are_compared() -> None:
    noise = NoiseFilter([Normalizer.TOOL_ORDER, Normalizer.JSON_KEYS])
    noise.settle("", [], [tool("read", path=1, limit=2), tool("write")])
    settled = noise.settle("", [], [tool("write"), tool("read", limit=2, path=1)])
    assert json.dumps(settled.tools) == json.dumps([tool("read", path=1, limit=2), tool("write")])
    assert settled.normalized == {"json_keys": 1, "tool_order": 1}


@pytest.mark.parametrize("style", [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": "\t"}])
def test_json_of_results_and_arguments_keeps_its_first_key_order_and_its_own_style(style: dict[str, Any]) -> None:
    noise = NoiseFilter([Normalizer.JSON_KEYS])
    first, second = {"b": [{"y": 1, "x": "é"}], "a": 1.0}, {"a": 1.0, "b": [{"x": "é", "y": 1}]}

    def sent(value: Any) -> list[Message]:
        text = json.dumps(value, ensure_ascii=False, **style)
        return [
            Message(
                role="assistant", content=text, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": text}}]
            ),
            Message(role="tool", content=f"\n{text} ", tool_call_id="1"),
        ]

    noise.settle("", sent(first), None)
    call, result = noise.settle("", sent(second), None).messages
    ordered = json.dumps(first, ensure_ascii=False, **style)
    assert call.content == sent(second)[0].content  # what the assistant said is not the client's to reorder
    assert call.tool_calls == [{"id": "1", "function": {"name": "f", "arguments": ordered}}]
    assert result.content == f"\n{ordered} "


@pytest.mark.parametrize(
    "texts_",
    [
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1.0}'),
        ('{"a": 1, "b": 2}', '{"b": 2,  "a": 1}'),
        ('{"a": 1, "a": 2}', '{"a": 2, "a": 1}'),
        ("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}"),
        ('{"a": 1', '{"b": 1'),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": 1e999}', '{"a": Infinity}'),
    ],
    ids=["another value", "odd blanks", "doubled keys", "not JSON", "cut short", "too deep", "no number"],
)
def test_what_is_not_the_same_json_in_another_order_is_left_alone(texts_: tuple[str, str]) -> None:
    noise = NoiseFilter([Normalizer.JSON_KEYS])
    for text in texts_:
        assert texts(noise, [Message(role="tool", content=text)]) == [text]


def test_json_too_large_to_remember_is_left_alone() -> None:
    noise = NoiseFilter([Normalizer.JSON_KEYS])
    long = "x" * MAX_JSON_CHARACTERS
    for value in ({"a": long, "b": 1}, {"b": 1, "a": long}):
        assert texts(noise, [Message(role="tool", content=json.dumps(value))]) == [json.dumps(value)]
    assert MAX_JSON_CHARACTERS < SCOPE_BYTES


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


@given(values=st.lists(json_values, min_size=1, max_size=5), style=st.sampled_from([{}, {"separators": (",", ":")}]))
def test_json_means_the_same_afterwards(values: list[Any], style: dict[str, Any]) -> None:
    noise = NoiseFilter(Normalizer)
    for value in values:
        sent = [Message(role="tool", content=json.dumps(value, **style))]
        settled = noise.settle("", sent, [tool("t", value=value)])
        content = settled.messages[0].content
        assert isinstance(content, str)
        assert json.loads(content) == value
        assert len(content) == len(json.dumps(value, **style))
        assert settled.tools == [tool("t", value=value)]


@given(before=st.text(), after=st.text())
def test_text_around_noise_is_never_touched(before: str, after: str) -> None:
    noise = NoiseFilter([Normalizer.DATES])
    texts(noise, [Message(role="system", content=f"{before} 2026-11-29 {after}")])
    (settled,) = texts(noise, [Message(role="system", content=f"{before} 2026-11-30 {after}")])
    assert settled == f"{before} 2026-11-29 {after}"


# --- through the server -----------------------------------------------------------------------------------------------


def ask(served: Served, cch: str, **options: Any) -> str:
    """One turn of an agent; returns the prompt's text as the executor saw it."""
    system = {
        "role": "system",
        "content": f"x-anthropic-billing-header: cch={cch};\nBe brief. Today is 2026-11-{cch[:2]}.",
    }
    body = {"messages": [system, {"role": "user", "content": "hi"}]}
    response = served.post("/v1/chat/completions", body, headers={"X-Trunkline-Run": "r"} | options)
    assert response.status_code == 200, response.text
    text = served.executor.requests[-1].text
    assert text is not None
    return text


def test_a_served_prompt_is_normalized_and_its_record_says_so(gateway: Served) -> None:
    assert ask(gateway, "11111").replace("2026-11-11", "2026-11-22") == ask(gateway, "22222")
    turns = gateway.client.get("/v1/runs/r").json()["turns"]
    assert [turn["normalized"] for turn in turns] == [{}, {"billing": 1}]
    metrics = gateway.client.get("/metrics").text
    assert 'trunkline_normalized_total{normalizer="billing"} 1.0' in metrics
    assert 'trunkline_normalized_total{normalizer="json_keys"} 0.0' in metrics


def test_what_is_normalized_is_a_setting(serve: Serve) -> None:
    everything, nothing = serve(normalize=tuple(Normalizer)), serve(normalize=())
    assert ask(everything, "11111") == ask(everything, "22222")
    assert ask(nothing, "11111") != ask(nothing, "22222")


def test_no_value_crosses_from_one_key_to_another(serve: Serve) -> None:
    served = serve(api_keys=("one", "two"), normalize=tuple(Normalizer))
    assert "cch=11111;" in ask(served, "11111", Authorization="Bearer one")
    assert "cch=22222;" in ask(served, "22222", Authorization="Bearer two")
    assert "cch=11111;" in ask(served, "22222", Authorization="Bearer one")


def test_tokenize_counts_what_generation_would_use(gateway: Served) -> None:
    ask(gateway, "11111")
    system = {"role": "system", "content": "x-anthropic-billing-header: cch=222;\nBe brief. Today is 2026-11-11."}
    body = {"messages": [system, {"role": "user", "content": "hi"}]}
    counted = gateway.post("/tokenize", body).json()["tokens"]
    assert counted == gateway.executor.requests[-1].tokens.tolist()


def as_chat(line: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": line}, {"role": "user", "content": "hi"}]}


def as_messages(line: str) -> dict[str, Any]:
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief.", "cache_control": {}}]
    return {"system": blocks, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def as_response(line: str) -> dict[str, Any]:
    return {"instructions": line, "input": "hi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", as_chat), ("/v1/messages", as_messages), ("/v1/responses", as_response)],
)
def test_a_billing_line_is_held_still_in_every_api(
    gateway: Served, path: str, body: Callable[[str], dict[str, Any]]
) -> None:
    for cch in ("11111", "22222"):
        response = gateway.post(path, body(f"x-anthropic-billing-header: cc_version=2.1.104.{cch[:3]}; cch={cch};"))
        assert response.status_code == 200, response.text
    first, second = gateway.executor.requests
    assert first.text == second.text
    assert dict(second.normalized) == {"billing": 2}
