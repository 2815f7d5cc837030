"""The gateway as an ASGI application: routes, API keys, one error shape, request counts."""

import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.gateway.anthropic.dialect import MessagesDialect
from trunkline.gateway.chat import ChatDialect
from trunkline.gateway.completions import CompletionDialect
from trunkline.gateway.context import Gateway, TokenTexts
from trunkline.gateway.errors import (
    CLIENT_GONE_STATUS,
    ApiError,
    ClientGone,
    Internal,
    Unauthorized,
    api_error_response,
    client_gone_response,
    http_exception_response,
)
from trunkline.gateway.executor import Executor
from trunkline.gateway.flights import Flights
from trunkline.gateway.generate import SCOPE_KEY, Generate
from trunkline.gateway.identity import key_scope
from trunkline.gateway.meta import Meta
from trunkline.gateway.metrics import Metrics
from trunkline.gateway.noise import NoiseFilter
from trunkline.gateway.openapi import OpenApi
from trunkline.gateway.records import RunRecords
from trunkline.gateway.responses.dialect import ResponsesDialect
from trunkline.gateway.responses.endpoints import StoredResponses
from trunkline.gateway.responses.store import ResponseStore
from trunkline.gateway.runs import Runs
from trunkline.gateway.settings import GatewaySettings
from trunkline.gateway.tools.checks import Checks
from trunkline.gateway.tools.memory import CallMemory

log = logging.getLogger("trunkline.gateway")

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Paths that need no API key."""


def build_app(
    executor: Executor, records: RunRecords, settings: GatewaySettings, responses: ResponseStore | None = None
) -> Starlette:
    """The application. The executor's sink must be `records.turn`; both outlive the application, and so do `responses`.

    Without `responses`, none is stored.

    `app.state.flights.drain(timeout_s)` stops it gracefully (`server.run_server` does); what is left when the
    application itself shuts down is aborted.
    """
    flights = Flights(settings)
    metrics = Metrics(executor)
    records.subscribe(metrics.turn_ended)
    gateway = Gateway(
        executor=executor,
        records=records,
        responses=responses or ResponseStore(None, max_bytes=0),
        settings=settings,
        metrics=metrics,
        flights=flights,
        token_text=TokenTexts(executor),
        noise=NoiseFilter(settings.normalize),
        calls=CallMemory(settings.call_memory_bytes),
        checks=Checks(executor),
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await flights.drain(0)

    app = Starlette(
        routes=_routes(gateway),
        middleware=[Middleware(Edge, settings=settings, metrics=metrics)],
        exception_handlers={
            ApiError: api_error_response,
            ClientGone: client_gone_response,
            HTTPException: http_exception_response,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.flights = flights
    app.state.settings = settings
    return app


def _routes(gateway: Gateway) -> list[Route]:
    meta, runs, messages, stored = Meta(gateway), Runs(gateway), MessagesDialect(gateway), StoredResponses(gateway)
    routes = [
        Route("/v1/chat/completions", Generate(gateway, ChatDialect(gateway)), methods=["POST"]),
        Route("/v1/completions", Generate(gateway, CompletionDialect(gateway)), methods=["POST"]),
        Route("/v1/responses", Generate(gateway, ResponsesDialect(gateway)), methods=["POST"]),
        Route("/v1/responses/{id}", stored.show),
        Route("/v1/responses/{id}", stored.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", stored.input_items),
        Route("/v1/messages", Generate(gateway, messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/models", meta.models),
        Route("/v1/models/{id:path}", meta.model),
        Route("/tokenize", meta.tokenize, methods=["POST"]),
        Route("/detokenize", meta.detokenize, methods=["POST"]),
        Route("/health", meta.health),
        Route("/metrics", meta.metrics),
        Route("/reset_prefix_cache", meta.reset_prefix_cache, methods=["POST"]),
        Route("/v1/runs", runs.declare, methods=["POST"]),
        Route("/v1/runs", runs.list),
        Route("/v1/runs/{id:path}/finish", runs.finish, methods=["POST"]),  # before {id}, whose ids may hold slashes
        Route("/v1/runs/{id:path}", runs.show),
    ]
    routes.append(Route("/openapi.json", OpenApi(routes).show))
    return routes


class Edge:
    """Checks API keys and counts requests, for every path."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: Metrics) -> None:
        self._app = app
        self._counter = metrics.http_requests
        share = settings.share_cache_across_keys
        self._scopes = [(key.encode(), "" if share else key_scope(key)) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through with its scope noted, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE_STATUS

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            scope[SCOPE_KEY] = self._scope_of_key(scope)
            await self._app(scope, receive, noting_status)
        except Unauthorized as refusal:
            await refusal.response(scope["path"])(scope, receive, noting_status)
        except Exception as bug:
            # Answered here: Starlette's own handler raises on, and the server would cut a connection that is in use.
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status != CLIENT_GONE_STATUS:
                raise
            internal = Internal(
                f"The server failed ({type(bug).__name__}). This is a bug: its log has the traceback; please report it."
            )
            await internal.response(scope["path"])(scope, receive, noting_status)
        finally:
            route = scope.get("route")
            path = route.path if isinstance(route, Route) else "unknown"
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "DELETE") else "other"
            self._counter.labels(path, method, status).inc()

    def _scope_of_key(self, scope: Scope) -> str:
        """The caller's scope. Raises `Unauthorized`."""
        if not self._scopes or scope["path"] in OPEN_PATHS:
            return ""
        headers = Headers(scope=scope)
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        # Every key is compared, in constant time, so that timing tells nothing about them.
        matches = [name for key, name in self._scopes if hmac.compare_digest(key, given.encode())]
        if not matches:
            what = "Incorrect API key" if given else "No API key"
            raise Unauthorized(f"{what} provided; send one of the server's keys as `Authorization: Bearer KEY`.")
        return matches[0]
