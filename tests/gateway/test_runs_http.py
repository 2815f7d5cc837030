"""`/v1/runs`: declare, list, show, finish."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.gateway.conftest import Serve, Served
from tests.gateway.scripted import say_and_hang
from tests.gateway.test_errors import error_of
from trunkline.core.types import RunKey, ServiceClass
from trunkline.wire.turns import Failed, RunPlan, TurnEvent


def show(gateway: Served, run: str) -> Any:
    response = gateway.client.get(f"/v1/runs/{run}")
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("stream", [False, True])
def test_a_turns_record_is_visible_when_its_response_ends(gateway: Served, stream: bool) -> None:
    for index in range(5):
        gateway.chat(stream=stream, headers={"X-Trunkline-Run": "r"})
        view = show(gateway, "r")
        assert [turn["index"] for turn in view["turns"]] == list(range(index + 1))
        assert view["state"] == "waiting"


def test_a_run_is_shown_turn_by_turn_with_totals(gateway: Served) -> None:
    gateway.chat("hi", headers={"X-Session-ID": "s"})
    view = show(gateway, "s")
    prompt = len("<user>hi<assistant>")
    assert (view["id"], view["parent"], view["origin"], view["node"]) == ("s", None, "session", "engine")
    (turn,) = view["turns"]
    assert turn["cached_tokens"] + turn["novel_tokens"] == turn["prompt_tokens"] == prompt
    assert turn["misses"] == [{"reason": "never_seen", "tokens": turn["novel_tokens"], "detail": ""}]
    assert turn["cost_usd"] == 0
    assert view["totals"]["prompt_tokens"] == prompt
    assert view["totals"]["turns"] == 1


def test_a_session_names_a_group_and_is_shown_with_its_run(gateway: Served) -> None:
    gateway.chat("hi", headers={"X-Session-ID": "s"})
    gateway.chat("hi", headers={"X-Trunkline-Run": "r", "X-Session-ID": "s"})
    hints = [request.hint for request in gateway.executor.requests]
    assert [(hint.run, hint.group) for hint in hints] == [(None, "s"), ("r", None)]
    assert [show(gateway, run)["session"] for run in ("s", "r")] == ["s", None]
    assert {row["id"]: row["session"] for row in gateway.client.get("/v1/runs").json()["data"]} == {"s": "s", "r": None}


def test_a_run_is_active_during_its_turn_and_waits_after_it(gateway: Served) -> None:
    gateway.executor.script = say_and_hang
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with gateway.client.stream("POST", "/v1/chat/completions", json=body, headers={"X-Trunkline-Run": "r"}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert show(gateway, "r")["state"] == "active"
        assert gateway.client.get("/v1/runs").json()["data"][0]["state"] == "active"


def test_declaring_a_run_tells_the_executor_and_answers_201(gateway: Served) -> None:
    body = {"id": "job 7/a", "name": "fix the build", "parent": "p", "objective": "green", "expected_turns": 12}
    response = gateway.post("/v1/runs", body | {"class": "batch", "expected_tokens": 9000})
    assert response.status_code == 201
    assert response.headers["x-trunkline-run"] == "job 7/a"
    assert response.json() | body == response.json()
    plan = RunPlan(parent="p", service=ServiceClass.BATCH, expected_turns=12, expected_tokens=9000)
    assert gateway.executor.declared == [(RunKey("", "job 7/a"), plan)]
    assert response.json()["admission"] == {"waits": False, "predicted_turns": 12.0, "predicted_tokens": 3456}
    assert show(gateway, "job 7%2Fa")["name"] == "fix the build"


REFUSED = Failed(429, "run_refused", "this new run is not let in now: try again in 41 s", 40.2)


def test_a_declared_run_that_is_not_let_in_gets_429_and_leaves_no_trace(gateway: Served) -> None:
    gateway.executor.refuse_runs = REFUSED
    response = gateway.post("/v1/runs", {"id": "r"})
    error = error_of(response, 429)
    assert (error["code"], error["type"]) == ("run_refused", "rate_limit_error")
    assert response.headers["retry-after"] == "41"
    assert gateway.client.get("/v1/runs/r").status_code == 404
    gateway.executor.refuse_runs = None
    assert gateway.post("/v1/runs", {"id": "r"}).status_code == 201


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_turn_of_a_run_that_is_not_let_in_gets_429(gateway: Served, stream: bool) -> None:
    async def refuse(*_: object) -> AsyncIterator[TurnEvent]:
        yield REFUSED

    gateway.executor.script = refuse
    response = gateway.chat(stream=stream)
    error = error_of(response, 429)
    assert (error["code"], error["type"]) == ("run_refused", "rate_limit_error")
    assert response.headers["retry-after"] == "41"


def test_a_run_that_is_surely_not_let_in_is_refused_before_its_prompt_is_rendered(gateway: Served) -> None:
    gateway.executor.turn_away = REFUSED
    for response in (gateway.chat(headers={"X-Trunkline-Run": "r"}), gateway.post("/v1/runs", {"id": "r"})):
        assert error_of(response, 429)["code"] == "run_refused"
        assert response.headers["retry-after"] == "41"
    assert gateway.executor.rendered == []
    assert gateway.executor.declared == []
    assert [hint.run for _, hint, _ in gateway.executor.asked] == ["r", "r"]


def test_a_class_that_does_not_exist_is_refused_with_those_that_do(gateway: Served) -> None:
    for response in (gateway.post("/v1/runs", {"class": "vip"}), gateway.chat(headers={"X-Trunkline-Class": "vip"})):
        assert "interactive, batch" in error_of(response, 400)["message"]


def test_agents_of_one_kind_have_one_digest_whatever_they_are_asked(gateway: Served) -> None:
    def kind(system: str, task: str, **fields: Any) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]
        assert gateway.post("/v1/chat/completions", {"messages": messages, **fields}).status_code == 200
        return gateway.executor.requests[-1].kind

    assert kind("be brief", "one") == kind("be brief", "two") != ""
    assert kind("be brief", "one") != kind("be long", "one")
    assert gateway.chat("no instructions").status_code == 200
    assert gateway.executor.requests[-1].kind == ""


@pytest.mark.parametrize("raw", [b"", b"{}"])
def test_a_run_declared_without_an_id_gets_one(gateway: Served, raw: bytes) -> None:
    response = gateway.client.post("/v1/runs", content=raw)
    assert response.status_code == 201
    run = response.json()["id"]
    assert gateway.chat(headers={"X-Trunkline-Run": run}).headers["x-trunkline-run"] == run
    assert len(show(gateway, run)["turns"]) == 1


def test_declaring_a_known_run_is_a_conflict(gateway: Served) -> None:
    gateway.chat(headers={"X-Trunkline-Run": "r"})
    error = error_of(gateway.post("/v1/runs", {"id": "r"}), 409)
    assert error["code"] == "run_exists"
    assert "X-Trunkline-Run: r" in error["message"]


def test_finishing_a_run_tells_the_executor_and_may_be_repeated(gateway: Served) -> None:
    gateway.chat(headers={"X-Trunkline-Run": "r"})
    for _ in range(2):
        assert gateway.client.post("/v1/runs/r/finish").json()["state"] == "finished"
    assert gateway.executor.finished == [RunKey("", "r")] * 2
    assert show(gateway, "r")["state"] == "finished"


def test_a_final_turn_finishes_its_run_by_the_end_of_the_response(gateway: Served) -> None:
    gateway.chat(headers={"X-Trunkline-Run": "r", "X-Trunkline-Run-Final": "true"})
    assert gateway.executor.requests[0].hint.final
    assert show(gateway, "r")["state"] == "finished"


def test_runs_are_listed_newest_first_and_paged(gateway: Served) -> None:
    for at in range(5):
        gateway.chat(headers={"X-Trunkline-Run": f"r{at}"})
    first = gateway.client.get("/v1/runs", params={"limit": 2}).json()
    assert [row["id"] for row in first["data"]] == ["r4", "r3"]
    assert first["has_more"]
    last = gateway.client.get("/v1/runs", params={"limit": 3, "before": "r3"}).json()
    assert [row["id"] for row in last["data"]] == ["r2", "r1", "r0"]
    assert not last["has_more"]


@pytest.mark.parametrize("limit", ["0", "1001", "many"])
def test_a_bad_limit_is_named(gateway: Served, limit: str) -> None:
    assert error_of(gateway.client.get("/v1/runs", params={"limit": limit}), 400)["param"] == "limit"


def test_unknown_runs_are_404s(gateway: Served) -> None:
    for response in (
        gateway.client.get("/v1/runs/x"),
        gateway.client.post("/v1/runs/x/finish"),
        gateway.client.get("/v1/runs", params={"before": "x"}),
    ):
        assert error_of(response, 404)["code"] == "run_not_found"


# --- keys -------------------------------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_isolate_caches_and_runs(serve: Serve) -> None:
    gateway = serve(api_keys=("sk-a", "sk-b"))
    for key in ("sk-a", "sk-b", "sk-a"):
        gateway.chat(headers=bearer(key) | {"X-Trunkline-Run": "r"})
    first, second, third = (request.salt for request in gateway.executor.requests)
    assert first == third != second
    assert "sk-a" not in first
    shown = [len(gateway.client.get("/v1/runs/r", headers=bearer(key)).json()["turns"]) for key in ("sk-a", "sk-b")]
    assert shown == [2, 1]


def test_keys_may_share_one_cache_if_so_configured(serve: Serve) -> None:
    gateway = serve(api_keys=("sk-a", "sk-b"), share_cache_across_keys=True)
    for key in ("sk-a", "sk-b"):
        gateway.chat(headers=bearer(key))
    assert {request.salt for request in gateway.executor.requests} == {""}


def test_an_api_key_header_works_like_a_bearer(serve: Serve) -> None:
    gateway = serve(api_keys=("sk-a",))
    assert gateway.chat(headers={"x-api-key": "sk-a"}).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-x"}, {"Authorization": "Basic sk-a"}])
def test_a_wrong_key_is_refused_before_anything_else(serve: Serve, headers: dict[str, str]) -> None:
    gateway = serve(api_keys=("sk-a",))
    response = gateway.chat(headers=headers)
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert gateway.executor.requests == []


def test_a_cache_salt_isolates_the_cache_but_not_the_list_of_runs(gateway: Served) -> None:
    gateway.chat(headers={"X-Trunkline-Run": "plain"})
    gateway.chat(cache_salt="secret", headers={"X-Trunkline-Run": "salted"})
    plain, salted = (request.salt for request in gateway.executor.requests)
    assert plain != salted
    assert len(show(gateway, "salted")["turns"]) == 1
    assert gateway.client.post("/v1/runs/salted/finish").json()["state"] == "finished"
    assert gateway.executor.finished == [RunKey(salted, "salted")]
