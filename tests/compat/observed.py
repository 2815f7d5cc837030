"""What the public doors of a server say about the runs of one task."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

LEAST_REUSE = 0.95


@dataclass
class Observed:
    """The runs that had turns while it was watched: `run` is the task's own, `branches` its descendants."""

    run: dict[str, Any] = field(default_factory=dict)
    branches: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        """Relations and tokens of all turns, for a test that fails."""
        return "\n".join(_described(view) for view in (self.run, *self.branches))

    @property
    def turns(self) -> list[int]:
        """Turns of the run, then of each branch in the order in which they began."""
        return [len(view["turns"]) for view in (self.run, *self.branches)]

    def children(self, run: str) -> list[str]:
        """The branches that left `run`."""
        return [view["id"] for view in self.branches if view["parent"] == run]


@contextmanager
def one_run(url: str) -> Iterator[Observed]:
    """Watch one task: when the block ends, its turns must be one run with branches, and its history reused.

    Nothing of ours may name a run, nor may a turn go to a run of another task. From every run's second turn on, at
    least 95 % of what could be reused was, and nothing that was promised was computed again.
    """
    with httpx.Client(base_url=url, timeout=30) as http:
        before = {run["id"]: run["turns"] for run in _runs(http)}
        seen = Observed()
        yield seen
        changed = [run["id"] for run in _runs(http) if run["turns"] != before.get(run["id"], 0)]
        views = sorted((http.get(f"/v1/runs/{run}").json() for run in changed), key=lambda view: view["started_at"])
        metrics = http.get("/metrics").text
    old = before.keys() & set(changed)
    assert not old, f"turns went to runs of other tasks: {old}"
    roots = [view for view in views if view["parent"] is None]
    assert len(roots) == 1, "\n".join(map(_described, views))
    (seen.run,) = roots
    seen.branches = [view for view in views if view["parent"] is not None]
    assert {view["parent"] for view in seen.branches} <= set(changed), "a branch left a run of another task"
    assert all("named" not in _relations(view) for view in views)
    assert reuse(views) >= LEAST_REUSE, "\n".join(map(_described, views))
    assert "trunkline_broken_promises_total 0.0" in metrics


def reuse(views: list[dict[str, Any]]) -> float:
    """Cached over reusable tokens of all turns but the first of each run; 1 where there are none."""
    later = [turn for view in views for turn in view["turns"][1:]]
    cached, reusable = (sum(turn[key] for turn in later) for key in ("cached_tokens", "reusable_tokens"))
    return float(cached / reusable) if reusable else 1.0


def kept_history(view: dict[str, Any]) -> float:
    """Of what a run's turns had read and said, the share that its next turns did not compute again.

    Stricter than reuse: a client that writes history in other words lowers what can be reused, but not this.
    """
    pairs = list(pairwise(view["turns"]))
    held = sum(min(turn["cached_tokens"], _history(before)) for before, turn in pairs)
    return float(held / sum(_history(before) for before, _ in pairs))


def _history(turn: dict[str, Any]) -> int:
    return int(turn["prompt_tokens"] + turn["completion_tokens"])


def _runs(http: httpx.Client) -> list[dict[str, Any]]:
    page = http.get("/v1/runs", params={"limit": 1000}).json()
    assert not page["has_more"]
    runs: list[dict[str, Any]] = page["data"]
    return runs


def _relations(view: dict[str, Any]) -> list[str]:
    return [turn["relation"] for turn in view["turns"]]


def _described(view: dict[str, Any]) -> str:
    keys = ("relation", "prompt_tokens", "cached_tokens", "reusable_tokens", "completion_tokens", "passages")
    turns = [" ".join(str(turn[key]) for key in keys) for turn in view["turns"]]
    return "\n  ".join([f"{view['id']} of {view['parent']}, {view['origin']}: {', '.join(keys)}", *turns])
