"""Stored responses by id: `GET` and `DELETE /v1/responses/{id}`, `GET /v1/responses/{id}/input_items`."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import InvalidRequest, ResponseNotFound, Unsupported
from trunkline.gateway.generate import SCOPE_KEY
from trunkline.gateway.meta import json_response
from trunkline.gateway.params import int_in_range
from trunkline.gateway.responses.store import Stored
from trunkline.wire.responses import ItemList, ResponseDeleted

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


class StoredResponses:
    """Handlers that share one gateway. A caller sees the responses of its own scope."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def _stored(self, request: Request) -> Stored:
        id = request.path_params["id"]
        stored = await asyncio.to_thread(self._gateway.responses.get, request.scope[SCOPE_KEY], id)
        if stored is None:
            raise ResponseNotFound(id)
        return stored

    async def show(self, request: Request) -> Response:
        """`GET /v1/responses/{id}`: the document that its client got."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise Unsupported("`stream` is not supported here: a stored response comes whole.", param="stream")
        return Response((await self._stored(request)).document, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/responses/{id}`. Responses that went on from it can be shown, but not gone on from."""
        id = request.path_params["id"]
        if not await asyncio.to_thread(self._gateway.responses.delete, request.scope[SCOPE_KEY], id):
            raise ResponseNotFound(id)
        return json_response(ResponseDeleted(id=id))

    async def input_items(self, request: Request) -> Response:
        """`GET /v1/responses/{id}/input_items?limit=&order=&after=`: what the request itself sent."""
        query = request.query_params
        try:
            limit = int_in_range("limit", int(query.get("limit", DEFAULT_LIMIT)), DEFAULT_LIMIT, 1, MAX_LIMIT)
        except ValueError:
            raise InvalidRequest("limit must be a whole number.", param="limit") from None
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f'order must be "asc" or "desc", not {order[:64]!r}.', param="order")
        stored = await self._stored(request)
        items = stored.input if order == "asc" else stored.input[::-1]
        after = query.get("after")
        if after is not None:
            places = [at for at, item in enumerate(items) if item.id == after]
            if not places:
                raise InvalidRequest(f"after names no item of this response: {after[:64]!r}.", param="after")
            items = items[places[0] + 1 :]
        shown = items[:limit]
        return json_response(
            ItemList(
                data=shown,
                first_id=shown[0].id if shown else None,
                last_id=shown[-1].id if shown else None,
                has_more=len(items) > limit,
            )
        )
