"""Where turns and runs meet admission: who must be asked, and what follows from the answer."""

import numpy as np

from trunkline.core.accounts import Account
from trunkline.core.actions import Action, RunAdmitted, RunRefused, TurnRefused
from trunkline.core.facts import RunDeclared, TurnArrived, TurnEnded
from trunkline.core.identity import Lineage
from trunkline.core.runs import Run
from trunkline.core.state import State
from trunkline.core.turns import Turn
from trunkline.core.types import EndReason, Ints, Relation, RunKey, RunOrigin


def is_new(state: State, fact: TurnArrived, found: Lineage) -> bool:
    """Whether a turn begins a run that was not let in.

    Turns of runs that were, their sub-agents and branches, and side calls about them are not asked.
    """
    run, parent = found.run, _run(state, fact.salt, found.parent)
    if run is not None and (run.admitted or run.key in state.admission.ledger.accounts):
        return False
    if parent is not None and (parent.admitted or parent.key in state.admission.ledger.accounts):
        return False
    if found.relation is not Relation.SIDE_CALL:
        return True
    leader = _run(state, fact.salt, fact.group)
    return found.passages == 0 and (leader is None or not leader.admitted)


def refusal(state: State, fact: TurnArrived, matched_tokens: int) -> TurnRefused | None:
    """Why the run that a turn begins is not let in; None if it is, or may wait."""
    state.admission.look_again(fact.at_ms)
    refused = state.admission.judge(_proposed(state, fact, RunKey(fact.salt, fact.fresh), matched_tokens), fact.at_ms)
    if refused is None:
        return None
    state.admission.refuse(refused, fact.at_ms, fact.kind, fact.service)
    return TurnRefused(fact.turn, refused.why, refused.retry_after_s, refused.reason)


def arrived(state: State, turn: Turn, *, new: bool) -> list[Action]:
    """A turn has joined its run: the run's account is opened, if it has none, and told of the turn."""
    run, fact, admission = turn.run, turn.fact, state.admission
    actions: list[Action] = []
    account = admission.ledger.accounts.get(run.key)
    if account is None:
        account = _proposed(state, fact, run.key, turn.matched_tokens)
        account.turns = max(0, run.turns - 1) if not new else 0
        actions = _enter(state, run, account, fact.at_ms, asked=new)
    novel = max(1, fact.prompt.tokens - turn.record.reusable_tokens)
    admission.turn_arrived(account, fact.at_ms, fact.prompt.tokens, novel, turn.record.tool_gap_ms)
    return actions


def ended(state: State, turn: Turn, fact: TurnEnded) -> None:
    """A turn ended, or its client left."""
    account = state.admission.ledger.accounts.get(turn.run.key)
    if account is not None:
        well = fact.reason in (EndReason.STOP, EndReason.LENGTH)
        state.admission.turn_ended(account, turn.record, turn.record.waited_ms, well, fact.at_ms)


def declared(state: State, fact: RunDeclared) -> list[Action]:
    """A client announced a run: it is let in, may wait, or is refused and forgotten."""
    state.admission.look_again(fact.at_ms)
    known = state.runs.get(fact.key)
    if known is not None:
        state.forget(state.runs.touch(known, fact.at_ms))
        return []
    account = state.admission.propose(fact.key, fact.at_ms, fact.kind, fact.service, _NOTHING, 0, 1)
    account.expected_turns, account.expected_tokens = fact.expected_turns, fact.expected_tokens
    parent = _run(state, fact.key.salt, fact.parent)
    asked = parent is None or not (parent.admitted or parent.key in state.admission.ledger.accounts)
    refused = state.admission.judge(account, fact.at_ms) if asked else None
    if refused is not None:
        state.admission.refuse(refused, fact.at_ms, fact.kind, fact.service)
        return [RunRefused(fact.key, refused.why, refused.retry_after_s, refused.reason)]
    run = state.runs.ensure(fact.key, fact.parent, RunOrigin.HEADER)
    state.forget(state.runs.touch(run, fact.at_ms))
    return _enter(state, run, account, fact.at_ms, asked=asked)


def admit_waiting(state: State, now_ms: float) -> list[Action]:
    """Let in who waits, as far as there is room."""
    state.admission.look_again(now_ms)
    admitted = state.admission.admit_waiting(now_ms)
    if not admitted:
        return []
    keys = {account.key for account in admitted}
    for key in keys:
        run = state.runs.get(key)
        assert run is not None, "a run that waits is remembered"
        run.admitted = True
    for turn in state.turns.values():
        if turn.run.key in keys:
            turn.record.waited_ms = now_ms - turn.fact.at_ms
    return [_let_in(account, waits=False) for account in admitted]


def _enter(state: State, run: Run, account: Account, at_ms: float, *, asked: bool) -> list[Action]:
    account.parent = RunKey(run.key.salt, run.parent) if run.parent is not None else None
    waits = state.admission.enter(account, at_ms, asked=asked)
    run.admitted = not waits
    return [_let_in(account, waits=waits)] if asked else []


def _let_in(account: Account, *, waits: bool) -> RunAdmitted:
    assert account.predicted is not None
    return RunAdmitted(account.key, waits, account.predicted.turns, account.predicted.peak_tokens)


def _proposed(state: State, fact: TurnArrived, key: RunKey, matched_tokens: int) -> Account:
    tokens = fact.prompt.tokens
    novel = max(1, tokens - matched_tokens)
    return state.admission.propose(key, fact.at_ms, fact.kind, fact.service, fact.prompt.symbols, tokens, novel)


def _run(state: State, salt: str, name: str | None) -> Run | None:
    return state.runs.get(RunKey(salt, name)) if name is not None else None


_NOTHING: Ints = np.empty(0, np.int32)
