"""Named server-sent events, as tests read them."""

import json
from typing import Any

import httpx


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of every event; each event's name must repeat its data's `type`."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        decoded = json.loads(data.removeprefix("data: "))
        assert name == f"event: {decoded['type']}"
        found.append(decoded)
    return found
