"""`/v1/runs`: declare a run, list runs, show one turn by turn, say that one is over.

A caller sees the runs of its own scope. A run with a turn in flight is `active`, whatever its record says.
"""

import asyncio
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trunkline.core.types import RunKey, RunState
from trunkline.gateway.body import BodyDecoder, read_body
from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import ExecutorFailed, InvalidRequest, RunExists, RunNotFound
from trunkline.gateway.generate import SCOPE_KEY
from trunkline.gateway.identity import check_id, salt_of, service_class
from trunkline.gateway.meta import json_response
from trunkline.gateway.params import int_in_range
from trunkline.wire.openai import DeclareRunBody
from trunkline.wire.records import AdmissionRow, RunList, RunView
from trunkline.wire.turns import Failed, RunHint, RunPlan

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000
MAX_TEXT = 4096


class Runs:
    """Handlers that share one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder("/v1/runs")

    async def declare(self, request: Request) -> Response:
        """`POST /v1/runs`: 201 with the new run, none of whose turns will be refused for load; or 429."""
        raw = await read_body(request, self._gateway.settings)
        body = self._decoder.decode(raw or b"{}", DeclareRunBody)
        scope: str = request.scope[SCOPE_KEY]
        run = check_id(body.id, "id") if body.id is not None else f"run-{uuid.uuid4().hex}"
        if body.parent is not None:
            check_id(body.parent, "parent")
            if body.parent == run:
                raise InvalidRequest("parent repeats the run's own id.", param="parent")
        for name, text in (("name", body.name), ("objective", body.objective)):
            if text is not None and len(text) > MAX_TEXT:
                raise InvalidRequest(f"{name} must have at most {MAX_TEXT} characters.", param=name)
        if body.expected_turns is not None:
            int_in_range("expected_turns", body.expected_turns, 1, 1, 1_000_000)
        if body.expected_tokens is not None:
            int_in_range("expected_tokens", body.expected_tokens, 1, 1, 1_000_000_000)
        plan = RunPlan(
            parent=body.parent,
            service=service_class(body.service, "class"),
            expected_turns=body.expected_turns,
            expected_tokens=body.expected_tokens,
        )
        key = RunKey(salt_of(scope, body.cache_salt), run)
        exists = RunExists(f"The run {run!r} exists already; send its turns with `X-Trunkline-Run: {run}`.", param="id")
        if await asyncio.to_thread(self._gateway.records.locate, scope, run) == key:
            raise exists
        self._gateway.let_in(key.salt, RunHint(run=run, parent=body.parent, service=plan.service), "")
        admitted = await self._gateway.executor.declare_run(key, plan)
        if isinstance(admitted, Failed):
            raise ExecutorFailed(admitted)
        created = await self._gateway.records.declare(
            key, parent=body.parent, name=body.name, objective=body.objective, expected_turns=body.expected_turns
        )
        if not created:
            raise exists
        row = AdmissionRow(
            waits=admitted.waits, predicted_turns=admitted.turns, predicted_tokens=round(admitted.peak_tokens)
        )
        view = msgspec.structs.replace(await self._view(scope, run), admission=row)
        return json_response(view, 201, {"X-Trunkline-Run": run})

    async def list(self, request: Request) -> Response:
        """`GET /v1/runs?limit=&before=`: newest first."""
        scope: str = request.scope[SCOPE_KEY]
        query = request.query_params
        try:
            limit = int_in_range("limit", int(query.get("limit", DEFAULT_LIMIT)), DEFAULT_LIMIT, 1, MAX_LIMIT)
        except ValueError:
            raise InvalidRequest("limit must be a whole number.", param="limit") from None
        before = query.get("before")
        records = self._gateway.records
        if before is not None and await asyncio.to_thread(records.locate, scope, before) is None:
            raise RunNotFound(before)
        rows = await asyncio.to_thread(records.runs, scope, limit + 1, before)
        shown = [
            msgspec.structs.replace(row, state=RunState.ACTIVE) if (scope, row.id) in self._gateway.active else row
            for row in rows[:limit]
        ]
        return json_response(RunList(data=shown, has_more=len(rows) > limit))

    async def show(self, request: Request) -> Response:
        """`GET /v1/runs/{id}`: the run turn by turn."""
        return json_response(await self._view(request.scope[SCOPE_KEY], request.path_params["id"]))

    async def finish(self, request: Request) -> Response:
        """`POST /v1/runs/{id}/finish`: its cache is worth little from now on. May be repeated."""
        scope: str = request.scope[SCOPE_KEY]
        run = request.path_params["id"]
        records = self._gateway.records
        key = await asyncio.to_thread(records.locate, scope, run)
        if key is None:
            raise RunNotFound(run)
        self._gateway.executor.finish_run(key)
        records.finish(key)
        await records.committed()
        return json_response(await self._view(scope, run))

    async def _view(self, scope: str, run: str) -> RunView:
        view = await asyncio.to_thread(self._gateway.records.run, scope, run)
        if view is None:
            raise RunNotFound(run)
        if (scope, run) in self._gateway.active:
            view = msgspec.structs.replace(view, state=RunState.ACTIVE)
        return view
