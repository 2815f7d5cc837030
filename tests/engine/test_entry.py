"""New runs that are turned away without asking the core, and how its decisions read in HTTP."""

import pytest

from tests.core.fake_engine import FakeEngine
from tests.core.helpers import make_engine, tokens
from trunkline.core.actions import TurnRefused
from trunkline.core.admission import CLOSED_MS
from trunkline.core.facts import RunFinished
from trunkline.core.types import Admission, RefusalReason, RunKey, ServiceClass
from trunkline.engine.entry import Door, failed
from trunkline.wire.turns import Failed, RunHint


@pytest.fixture
def full() -> FakeEngine:
    """An engine that has just refused a run."""
    engine = make_engine(admission=Admission.RUNS_CAP, admission_cap=1, max_wait_ms=0.0)
    for name in ("open", "refused"):
        engine.arrive(tokens(100, 1000 + 500 * len(name)), run=name)
        engine.run_all()
    assert len(engine.refused) == 1
    return engine


def ask(door: Door, engine: FakeEngine, hint: RunHint, kind: str = "", later_ms: float = 0.0) -> Failed | None:
    return door.ask(engine.core.state, "", hint, kind, engine.now_ms + later_ms)


def test_a_named_run_like_one_just_refused_is_turned_away_each_for_longer(full: FakeEngine) -> None:
    door = Door()
    first, second = ask(door, full, RunHint(run="new")), ask(door, full, RunHint(group="session"))
    assert first is not None and second is not None
    assert (first.status, first.code) == (429, "run_refused")
    assert first.message == full.refused[0].why
    assert first.retry_after_s is not None and second.retry_after_s is not None
    assert second.retry_after_s > first.retry_after_s >= (full.refused[0].retry_after_s or 0)
    assert door.turned_away == 2


@pytest.mark.parametrize(
    "hint",
    [
        RunHint(run="open"),
        RunHint(run="sub", parent="open"),
        RunHint(),
        RunHint(run="new", service=ServiceClass.BATCH),
    ],
)
def test_what_may_belong_to_a_known_run_or_is_of_another_class_is_judged(full: FakeEngine, hint: RunHint) -> None:
    assert ask(Door(), full, hint) is None


def test_another_kind_is_judged(full: FakeEngine) -> None:
    assert ask(Door(), full, RunHint(run="new"), kind="other") is None


def test_the_door_is_closed_for_a_moment_and_opens_when_a_run_ends(full: FakeEngine) -> None:
    assert ask(Door(), full, RunHint(run="new"), later_ms=CLOSED_MS + 1) is None
    full.core.handle(RunFinished(at_ms=full.now_ms, key=RunKey("", "open")))
    assert ask(Door(), full, RunHint(run="new")) is None


def test_refusals_read_as_429_if_trying_again_can_help() -> None:
    assert failed(TurnRefused(1, "too long", None)).status == 400
    busy = failed(TurnRefused(1, "busy", 2.0, RefusalReason.MEMORY))
    assert (busy.status, busy.code, busy.retry_after_s) == (429, "run_refused", 2.0)
    assert failed(TurnRefused(1, "full", 1.0, RefusalReason.QUEUE_FULL)).code == "queue_full"
