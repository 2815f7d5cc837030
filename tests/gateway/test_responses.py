"""`/v1/responses`: what reaches the executor, and what OpenAI's own client makes of the answers."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.gateway.conftest import Serve, Served
from tests.gateway.scripted import CONTEXT, say_and_hang
from tests.gateway.sse import named_events
from tests.gateway.test_errors import error_of, refuse
from tests.live import wait_for
from trunkline.gateway.responses.translate import carry

PATH = "/v1/responses"


@pytest.fixture
def client(gateway: Served) -> Iterator[openai.OpenAI]:
    with connected(gateway) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    return serve_module()


def connected(gateway: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=key, max_retries=0)


def post(gateway: Served, given: Any = "hi", **fields: Any) -> Any:
    return gateway.post(PATH, {"model": "scripted", "input": given, **fields})


def prompt(gateway: Served, given: Any = "hi", **fields: Any) -> str:
    """The prompt text that a request made."""
    response = post(gateway, given, **fields)
    assert response.status_code == 200, response.text
    text = gateway.executor.requests[-1].text
    assert text is not None
    return text


def test_a_response_has_text_usage_and_what_was_asked_for(gateway: Served, client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="scripted", input="hi", temperature=0.5, metadata={"a": "b"}, user="me", prompt_cache_key="k"
    )
    assert (response.object, response.status, response.output_text) == ("response", "completed", "hello")
    assert (response.error, response.incomplete_details) == (None, None)
    (item,) = response.output
    assert item.type == "message"
    assert item.status == "completed"
    length = len("<user>hi<assistant>")
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (length, 5, length + 5)
    assert usage.input_tokens_details.cached_tokens == length // 2
    assert usage.output_tokens_details.reasoning_tokens == 0
    repeated = (response.temperature, response.top_p, response.metadata, response.user, response.prompt_cache_key)
    assert repeated == (0.5, 1.0, {"a": "b"}, "me", "k")
    assert response.completed_at is not None


def test_a_stream_ends_in_the_response_that_a_whole_answer_is(client: openai.OpenAI) -> None:
    with client.responses.stream(model="scripted", input="hi") as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "hello"
        streamed = stream.get_final_response()
    whole = client.responses.create(model="scripted", input="hi")
    assert streamed.output_text == whole.output_text
    assert streamed.usage == whole.usage
    assert (streamed.status, streamed.text, streamed.tools) == (whole.status, whole.text, whole.tools)


def test_a_stream_is_openais_events_numbered_from_zero(gateway: Served) -> None:
    gateway.executor.reply = "hi"
    events = named_events(post(gateway, stream=True))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, completed = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert completed["id"] == created["id"]
    item = events[2]["item"]
    assert (item["status"], item["content"]) == ("in_progress", [])
    assert completed["output"] == [events[8]["item"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    assert {event["output_index"] for event in events if "output_index" in event} == {0}
    assert events[6]["text"] == "hi"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_cut_by_the_limit_is_incomplete(gateway: Served, stream: bool) -> None:
    answer = post(gateway, stream=stream, max_output_tokens=3)
    response = named_events(answer)[-1]["response"] if stream else answer.json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "hel")


def test_a_limit_beyond_the_context_means_the_rest_of_it(gateway: Served) -> None:
    assert post(gateway, max_output_tokens=100_000).status_code == 200
    assert gateway.executor.requests[0].max_tokens == CONTEXT - len("<user>hi<assistant>")


def test_an_answer_without_text_has_no_items(gateway: Served) -> None:
    gateway.executor.reply = ""
    assert post(gateway).json()["output"] == []
    kinds = [event["type"] for event in named_events(post(gateway, stream=True))]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]


def test_logprobs_come_with_the_text_they_made(gateway: Served, client: openai.OpenAI) -> None:
    gateway.executor.reply = "h"
    response = client.responses.create(
        model="scripted", input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    (item,) = response.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text" and part.logprobs is not None
    (entry,) = part.logprobs
    assert (entry.token, entry.bytes, entry.logprob) == ("h", [104], -0.5)
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("h", -0.5), ("i", -1.5)]
    events = named_events(post(gateway, stream=True, top_logprobs=1))
    assert [event["logprobs"][0]["token"] for event in events if event["type"].endswith("text.delta")] == ["h"]


# --- what is asked ----------------------------------------------------------------------------------------------


def test_instructions_and_leading_system_messages_are_one_system_message(gateway: Served) -> None:
    given = [
        {"role": "developer", "content": "b"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "user", "content": "there"},
        {"role": "developer", "content": "late"},
    ]
    assert prompt(gateway, given, instructions="a") == "<system>a\nb<user>hi\nthere<developer>late<assistant>"


def test_a_tool_loop_reaches_the_template_as_chat_messages(gateway: Served) -> None:
    given = [
        {"role": "user", "content": "add"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "one", "annotations": []}, {"type": "refusal", "refusal": "!"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": carry("well")},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "so?"},
    ]
    tools = [{"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}}]
    text = prompt(gateway, given, tools=tools)
    assert text == "<tool add><user>add<assistant>one!<tool>3<tool>4<assistant>7<user>so?<assistant>"
    _, first, *results, second, _ = gateway.executor.rendered[-1]
    assert (first["reasoning_content"], second["reasoning_content"]) == ("hm", "well")
    assert [(call["id"], call["function"]["arguments"]) for call in first["tool_calls"]] == [
        ("c1", {"a": 1}),
        ("c2", {}),
    ]
    assert [result["tool_call_id"] for result in results] == ["c1", "c2"]


def test_functions_in_a_namespace_have_one_name_to_the_model(gateway: Served) -> None:
    members = [{"type": "function", "name": "spawn", "parameters": {}}, {"type": "custom", "name": "x"}]
    tools = [{"type": "namespace", "name": "agents", "description": "d", "tools": members}]
    call = {"type": "function_call", "call_id": "c", "namespace": "agents", "name": "spawn", "arguments": "{}"}
    given = [{"role": "user", "content": "go"}, call, {"type": "function_call_output", "call_id": "c", "output": "1"}]
    assert prompt(gateway, given, tools=tools) == "<tool agents__spawn><user>go<assistant><tool>1<assistant>"
    (sent,) = gateway.executor.rendered[-1][1]["tool_calls"]
    assert sent["function"]["name"] == "agents__spawn"


def test_a_template_that_wants_roles_in_turn_gets_them(gateway: Served) -> None:
    gateway.executor.strict_template = True
    given = [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    assert prompt(gateway, given, instructions="be kind") == "<system>be kind<user>a\nb\nc<assistant>"


def test_reasoning_that_another_server_encrypted_is_left_out(gateway: Served) -> None:
    foreign = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAAA"}
    given = [{"role": "user", "content": "a"}, foreign, {"role": "assistant", "content": "b"}]
    assert prompt(gateway, [*given, {"role": "user", "content": "c"}]) == "<user>a<assistant>b<user>c<assistant>"
    assert "reasoning_content" not in gateway.executor.rendered[-1][1]


def test_sampling_and_effort_reach_the_executor(gateway: Served) -> None:
    post(gateway, temperature=0.5, top_p=0.9, top_k=40, seed=7, stop=["END"], reasoning={"effort": "none"})
    (request,) = gateway.executor.requests
    how = request.sampling
    assert (how.temperature, how.top_p, how.top_k, how.seed, request.stop) == (0.5, 0.9, 40, 7, ("END",))
    assert gateway.executor.options[-1] == {"reasoning_effort": "none", "enable_thinking": False}


def test_tools_that_no_model_here_can_call_are_left_out_and_named_once(
    gateway: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trunkline.gateway")
    for _ in range(2):
        assert prompt(gateway, tools=[{"type": "web_search"}], tool_choice="auto") == "<user>hi<assistant>"
    assert sum("web_search" in record.message for record in caplog.records) == 1


def test_a_prompt_cache_key_names_the_session(gateway: Served) -> None:
    turns = [post(gateway, prompt_cache_key="s").headers["x-trunkline-run"] for _ in range(2)]
    assert turns == ["s", "s"]


# --- stored responses -------------------------------------------------------------------------------------------


def test_a_response_goes_on_from_the_one_before(gateway: Served, client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="one", instructions="be kind")
    second = client.responses.create(model="scripted", input="two", previous_response_id=first.id)
    assert gateway.executor.requests[-1].text == "<user>one<assistant>hello<user>two<assistant>"
    with client.responses.stream(model="scripted", input="three", previous_response_id=second.id) as stream:
        third = stream.get_final_response()
    assert third.previous_response_id == second.id
    client.responses.create(model="scripted", input="four", previous_response_id=third.id)
    told = "".join(f"<user>{word}<assistant>hello" for word in ("one", "two", "three"))
    assert gateway.executor.requests[-1].text == f"{told}<user>four<assistant>"


def test_a_stored_response_is_shown_listed_and_deleted(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "type": "message"}]
    response = client.responses.create(model="scripted", input=given)
    assert client.responses.retrieve(response.id) == response
    items = client.responses.input_items.list(response.id, order="asc", limit=1)
    assert [item.content[0].text for item in items if item.type == "message"] == ["a", "b"]  # type: ignore[union-attr]
    newest = client.responses.input_items.list(response.id).data[0]
    assert newest.type == "message" and newest.role == "user"
    client.responses.delete(response.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=response.id):
            gone(response.id)
    with pytest.raises(openai.NotFoundError, match="send the whole conversation") as missing:
        client.responses.create(model="scripted", input="c", previous_response_id=response.id)
    assert missing.value.code == "previous_response_not_found"


def test_a_chain_with_a_deleted_link_says_which(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="one")
    second = client.responses.create(model="scripted", input="two", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=f"'{second.id}' goes on from '{first.id}'"):
        client.responses.create(model="scripted", input="c", previous_response_id=second.id)


def test_a_response_that_must_not_be_stored_is_not(client: openai.OpenAI) -> None:
    response = client.responses.create(model="scripted", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_key_sees_its_own_responses_only(serve: Serve) -> None:
    gateway = serve(api_keys=("a", "b"))
    with connected(gateway, "a") as one, connected(gateway, "b") as other:
        response = one.responses.create(model="scripted", input="secret")
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="scripted", input="tell", previous_response_id=response.id)
        for attempt in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                attempt(response.id)
        assert one.responses.retrieve(response.id).output_text == "hello"


def test_an_item_that_a_stored_response_put_out_is_sent_by_its_id(serve: Serve) -> None:
    gateway = serve(api_keys=("a", "b"))
    with connected(gateway, "a") as client, connected(gateway, "b") as other:
        first = client.responses.create(model="scripted", input="one")
        said = first.output[0].id
        assert said is not None
        given: Any = [
            {"role": "user", "content": "one"},
            {"type": "item_reference", "id": said},
            {"role": "user", "content": "two"},
        ]
        second = client.responses.create(model="scripted", input=given)
        assert gateway.executor.requests[-1].text == "<user>one<assistant>hello<user>two<assistant>"
        with pytest.raises(openai.NotFoundError, match="send the whole item") as missing:
            other.responses.create(model="scripted", input=given)
        assert (missing.value.code, missing.value.param) == ("item_not_found", "input[1].id")
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="send the whole item"):
            client.responses.create(model="scripted", input=given)
        client.responses.create(model="scripted", input="three", previous_response_id=second.id)
        told = "<user>one<assistant>hello<user>two<assistant>hello<user>three<assistant>"
        assert gateway.executor.requests[-1].text == told


def test_a_response_cut_by_the_limit_is_gone_on_from(gateway: Served, client: openai.OpenAI) -> None:
    cut = client.responses.create(model="scripted", input="hi", max_output_tokens=3)
    client.responses.create(model="scripted", input="go on", previous_response_id=cut.id)
    assert gateway.executor.requests[-1].text == "<user>hi<assistant>hel<user>go on<assistant>"


def test_items_listed_after_one_go_on_from_it(gateway: Served) -> None:
    response = post(gateway, [{"role": "user", "content": word, "id": f"item_{word}"} for word in "abc"]).json()
    path = f"{PATH}/{response['id']}/input_items"
    page = gateway.client.get(path, params={"order": "asc", "after": "item_a", "limit": 1}).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (["item_b"], True)
    for wrong in ({"after": "x"}, {"limit": "x"}, {"limit": 0}, {"order": "up"}):
        error_of(gateway.client.get(path, params=wrong), 400)
    assert error_of(gateway.client.get(f"{PATH}/{response['id']}", params={"stream": "true"}), 400)["param"] == "stream"


# --- errors -----------------------------------------------------------------------------------------------------


BAD = [
    # fields, code, param, what the message must say
    ({"input": None}, "missing_required_parameter", "input", "required"),
    ({"input": []}, "invalid_value", "input", "at least one"),
    ({"input": 3}, "invalid_type", "input", "`int`"),
    ({"input": [{"role": "king", "content": "x"}]}, "invalid_value", "input[0].role", "developer"),
    ({"input": [{"content": "x"}]}, "missing_required_parameter", "input[0].role", "required"),
    ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content", "required"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "missing_required_parameter", "input[0].call_id", "required"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c"}]},
        "missing_required_parameter",
        "input[0].output",
        "required",
    ),
    ({"input": [{"type": "item_reference"}]}, "unsupported_parameter", "input[0].type", "whole item"),
    ({"input": [{"type": "mcp_call"}]}, "unsupported_parameter", "input[0].type", "mcp_call"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "unsupported_parameter",
        "input[0].content[0]",
        "input_image",
    ),
    ({"input": [{"role": "user", "content": "refuse me"}]}, "template_error", "input", "alternate"),
    ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens", "from 1"),
    ({"max_tokens": 5}, "invalid_value", "max_tokens", "max_output_tokens"),
    ({"background": True}, "unsupported_parameter", "background", "stream"),
    ({"conversation": "c"}, "unsupported_parameter", "conversation", "previous_response_id"),
    ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt", "instructions"),
    ({"truncation": "some"}, "invalid_value", "truncation", "auto"),
    ({"n": 2}, "unsupported_parameter", "n", "one answer"),
    ({"temperature": -1}, "invalid_value", "temperature", "from 0"),
    ({"top_logprobs": 21}, "invalid_value", "top_logprobs", "20"),
    ({"tool_choice": {"type": "web_search"}}, "unsupported_parameter", "tool_choice", "functions"),
    ({"tool_choice": {"type": "function"}}, "invalid_value", "tool_choice", "name"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "unsupported_parameter",
        "tool_choice.tools",
        "functions",
    ),
    ({"text": {"format": 3}}, "invalid_type", "text.format", "`int`"),
]


@pytest.mark.parametrize(("fields", "code", "param", "says"), BAD)
def test_a_bad_field_is_named_with_the_fix(
    shared: Served, fields: dict[str, Any], code: str, param: str, says: str
) -> None:
    error = error_of(shared.post(PATH, {"model": "scripted", "input": "hi", **fields}), 400)
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert says in error["message"]


def test_a_prompt_that_does_not_fit_is_refused_by_its_input(shared: Served) -> None:
    error = error_of(post(shared, "x" * CONTEXT, truncation="auto"), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert error_of(post(shared, model="other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(("status", "code"), [(500, "server_error"), (429, "rate_limit_exceeded")])
def test_an_error_after_the_first_event_fails_the_response(gateway: Served, status: int, code: str) -> None:
    gateway.executor.script = refuse(status, "engine_failed", after_accepting=True)
    events = named_events(post(gateway, stream=True))
    failed = events[-1]
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": "the executor says no"}
    (item,) = failed["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "a")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    error_of(gateway.client.get(f"{PATH}/{failed['response']['id']}"), 404)
    assert gateway.executor.open_turns == 0


def test_a_client_that_leaves_frees_its_turn_and_nothing_is_stored(gateway: Served, client: openai.OpenAI) -> None:
    gateway.executor.script = say_and_hang
    with client.responses.create(model="scripted", input="hi", stream=True) as stream:
        created = next(iter(stream))
        assert created.type == "response.created"
        assert gateway.executor.open_turns == 1
    wait_for(lambda: gateway.executor.open_turns == 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.response.id)
