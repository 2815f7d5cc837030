"""Which new runs are let in, and when: an admitted run is never refused a turn, so the decision falls before its first.

A new run is admitted while the loops that are open, and it with them, are predicted to keep their pace: a closed loop
over the engine (`core/closed_loop.py`), with what every run is expected to need (`core/accounts.py`). The prediction is
corrected by what was observed: the nine-in-ten stretch of runs against the model's. Otherwise it waits in its class's
line, if the predicted wait is short enough; else it is refused, and told when to come back.

Turns of runs that have begun, sub-agents and branches are not asked. Rivals: let all in, or cap open runs or turns.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trunkline.core.accounts import Account, Footprint, Ledger
from trunkline.core.closed_loop import Engine, Mix, lost_share, pace
from trunkline.core.corrections import Losses, Promises, StepTimes, Stretches, Tally
from trunkline.core.digest import EMPTY, extended
from trunkline.core.habits import Kinds
from trunkline.core.predict import CostModel
from trunkline.core.types import Admission, CoreSettings, Ints, RefusalReason, RunKey, ServiceClass, TurnRecord

KIND_SYMBOLS = 64
"""A run whose kind is not named is of the kind of those whose first prompts begin with the same symbols."""
REMEMBERED = 64
"""Runs, and short steps, whose observed pace corrects the prediction."""
OBSERVED_TURNS = 4
"""Every so many turns, and at its end, a run's stretch corrects the model."""
RECHECK_MS = 500.0
"""The line is looked at again when a run ended, and this often besides."""
OVERDUE = 10.0
"""A run that waits longer than so many times its class's bound is let in at an ever laxer objective: none starves."""
LEAST_BOUND_MS = 60_000.0
BATCH_HANDICAP_MS = 30_000.0
"""Head start of interactive runs over batch runs in the line: bounded, so that batch runs do not starve."""
CLOSED_MS = 1000.0
"""For so long after a refusal, or until a run ends, others like it are refused without a new judgement."""
MOST_RETRY_S = 900.0
"""Nobody is told to stay away longer: what is predicted so far ahead is not known."""
LEAST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a new run is not let in, and when it may be."""

    reason: RefusalReason
    why: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Closed:
    """Until when new runs like one that was refused may be turned away without asking.

    Each further one is told to stay away for `each_s` longer.
    """

    refusal: Refusal
    until_ms: float
    each_s: float


class AdmissionControl:
    """Judges new runs and keeps the line of those that wait."""

    def __init__(self, settings: CoreSettings, costs: CostModel) -> None:
        self._settings, self._costs = settings, costs
        self.kinds = Kinds()
        self.ledger = Ledger(settings, costs)
        self.tally = Tally()
        self.waiting: dict[RunKey, Account] = {}
        self.closed: dict[tuple[str, ServiceClass], Closed] = {}
        """Kinds, as they were named, that were refused a moment ago. Executors may read it from any thread."""
        self._steps = StepTimes(costs)
        self._lost = Losses()
        self._stretch = Stretches()
        self._short_ms: deque[float] = deque(maxlen=REMEMBERED)
        self._promises = Promises(settings.max_waiting_runs)
        self._checked_ms = -RECHECK_MS
        self._changed = False

    # --- new runs -----------------------------------------------------------------------------------------------

    def propose(
        self, key: RunKey, at_ms: float, kind: str, service: ServiceClass, symbols: Ints, prompt: int, novel: int
    ) -> Account:
        """The account of a run that might begin with a prompt of `prompt` tokens, `novel` of which never arrived."""
        name = kind or f"begins {extended(EMPTY, symbols[:KIND_SYMBOLS])}"
        return Account(key, self.kinds.of(name), service, at_ms, prompt, novel, admitted=False)

    def judge(self, account: Account, now_ms: float) -> Refusal | None:
        """Let a new run in, or into the line; or say why not. Changes nothing."""
        ahead = sum(1 for _ in self._ahead_of(account))
        limit = self._limit(account, now_ms) if not ahead else RefusalReason.QUEUE_FULL
        if limit is None:
            return None
        same = sum(1 for other in self.waiting.values() if other.root and other.service is account.service)
        too_many = self._too_many(account)
        wait_ms = self._wait_ms(too_many + ahead)
        full = same >= self._settings.max_waiting_runs
        if not full and wait_ms <= self._settings.max_wait_ms * self._patience(account.service):
            return None
        if limit is RefusalReason.QUEUE_FULL and not full:
            limit = self._limit(account, now_ms) or limit
        retry_ms = self._wait_ms(too_many + ahead + self._promises.due_after(now_ms))
        retry_s = min(MOST_RETRY_S, max(LEAST_RETRY_S, retry_ms / 1e3))
        return Refusal(limit, self._explain(account, limit, retry_s), retry_s)

    def refuse(self, refusal: Refusal, now_ms: float, kind: str, service: ServiceClass) -> None:
        """A run was refused: remember what it was told. Others like it need not ask for a moment."""
        self.tally.refused[refusal.reason] += 1
        rate = self.ledger.leaving
        each_s = min(MOST_RETRY_S, self._promises.ratio / rate / 1e3) if rate > 0 else 0.0
        self.closed[kind, service] = Closed(refusal, now_ms + CLOSED_MS, each_s)
        self._promises.made(now_ms, refusal.retry_after_s * 1e3)

    def enter(self, account: Account, now_ms: float, *, asked: bool) -> bool:
        """A run begins. `asked`: it was judged; otherwise it is let in anyway. Whether it waits."""
        account.predicted = account.footprint(self._settings.slot_tokens)
        self.ledger.accounts[account.key] = account
        account.root = asked
        parent = self.waiting.get(account.parent) if account.parent is not None else None
        if parent is not None:  # it waits with its parent
            account.arrived_ms, account.service = parent.arrived_ms, parent.service
            self.waiting[account.key] = account
            return True
        if asked and (any(self._ahead_of(account)) or self._limit(account, now_ms) is not None):
            account.told_ms = self._wait_ms(self._too_many(account) + sum(1 for _ in self._ahead_of(account)))
            self.waiting[account.key] = account
            self.tally.queued += 1
            return True
        self._admit(account, now_ms)
        return False

    def admit_waiting(self, now_ms: float) -> list[Account]:
        """Let in who waits, in order, as far as there is room."""
        if not self.waiting or not (self._changed or now_ms - self._checked_ms >= RECHECK_MS):
            return []
        self._changed, self._checked_ms = False, now_ms
        admitted, full = [], False
        for account in sorted(self.waiting.values(), key=_rank):
            if account.root:
                full = full or self._limit(account, now_ms) is not None
                if full:
                    continue
            elif account.parent in self.waiting:
                continue
            self.tally.queued_ms += now_ms - account.arrived_ms
            if account.root:
                self._promises.learn(now_ms - account.arrived_ms, account.told_ms)
            del self.waiting[account.key]
            self._admit(account, now_ms)
            admitted.append(account)
        return admitted

    @property
    def due_ms(self) -> float:
        """When the clock alone may let somebody in."""
        return self._checked_ms + RECHECK_MS if self.waiting else math.inf

    def _admit(self, account: Account, now_ms: float) -> None:
        account.admitted = True
        if account.root:
            self.tally.admitted += 1
            self._promises.kept(now_ms)
        if not account.in_flight:
            account.silent_ms = now_ms
            self.ledger.silent[account.key] = now_ms
        self.ledger.count(account, now_ms)

    # --- what happens to runs -----------------------------------------------------------------------------------

    def turn_arrived(
        self, account: Account, at_ms: float, prompt_tokens: int, growth: int, gap_ms: float | None
    ) -> None:
        """A turn of the run arrived, with `growth` new prompt tokens after a tool gap."""
        if account.turns:
            account.growth.saw(growth)
            account.kind.saw("growth_tokens", growth)
        if gap_ms is not None:
            account.gap.saw(gap_ms)
            account.kind.saw("gap_ms", gap_ms)
            account.kind.gaps.saw(gap_ms)
            account.spent_ms += gap_ms
            account.ideal_ms += gap_ms
        if account.dead and account.turns:
            account.kind.endings.ended(account.turns, -account.dead)
        account.dead, account.silent_ms = 0.0, None
        account.in_flight += 1
        account.prompt_tokens = account.context_tokens = prompt_tokens
        account.peak_tokens = max(account.peak_tokens, prompt_tokens)
        self.ledger.silent.pop(account.key, None)
        self.ledger.count(account, at_ms)

    def turn_ended(self, account: Account, record: TurnRecord, waited_ms: float, well: bool, now_ms: float) -> None:
        """A turn of the run ended; it `waited_ms` to be admitted."""
        account.in_flight -= 1
        if account.key in self.waiting:
            del self.waiting[account.key]
            self.ledger.remove(account.key)
            return
        if well:
            self._learn(account, record, waited_ms, now_ms)
        account.turns += 1
        account.kind.endings.took(account.turns)
        account.context_tokens = record.prompt_tokens + record.completion_tokens
        account.peak_tokens = max(account.peak_tokens, account.context_tokens)
        if not account.in_flight:
            account.silent_ms = now_ms
            self.ledger.silent[account.key] = now_ms
        self.ledger.count(account, now_ms)
        self._changed = True

    def over(self, key: RunKey) -> None:
        """The run ended, or is presumed to have."""
        account = self.ledger.accounts.get(key)
        if account is None or account.in_flight:
            return
        self.waiting.pop(key, None)
        if account.turns:
            account.kind.endings.ended(account.turns, 1.0 - account.dead)
            self._observe(account)
            if account.root and account.predicted is not None:
                self._compare(account, account.predicted)
        self.ledger.remove(key)
        self._changed = True
        self.closed = {}

    def look_again(self, now_ms: float) -> None:
        """Count silent runs anew; those that are unlikely to come back count no more."""
        for account in self.ledger.look_again(now_ms):
            self.over(account.key)

    def saw_decode(self, sequences: int, context_tokens: float, ms: float) -> None:
        """A decode call was measured."""
        self._steps.saw(sequences, context_tokens, ms)

    def _learn(self, account: Account, record: TurnRecord, waited_ms: float, now_ms: float) -> None:
        prompt, out = record.prompt_tokens, record.completion_tokens
        account.output.saw(out)
        account.kind.saw("output_tokens", out)
        slices = self._settings.max_slice_tokens
        reused = min(record.reusable_tokens, prompt - 1)
        ideal = self._costs.prefill_whole_ms(prompt - reused, reused, slices)
        ideal += max(0, out - 1) * self._steps.ms(1, prompt)
        spent = max(0.0, now_ms - record.arrived_ms - waited_ms)
        account.spent_ms += max(spent, ideal)
        account.ideal_ms += ideal
        self.ledger.turn_ms.saw(spent)
        if out <= self._settings.short_tokens:
            self._short_ms.append(spent)
        mixes = self.ledger.mixes(None)
        if mixes:
            account.modelled.saw(pace(mixes[0], self._engine).stretch)
        if mixes and account.turns and record.reusable_tokens:
            self._lost.saw(lost_share(mixes[0], self._engine), 1.0 - record.cached_tokens / record.reusable_tokens)
        if account.turns % OBSERVED_TURNS == OBSERVED_TURNS - 1:
            self._observe(account)

    def gauges(self) -> dict[str, float]:
        """For `/metrics`."""
        return {
            "runs_open": len(self.ledger),
            "runs_open_expected": self.ledger.held_now,
            "runs_waiting": len(self.waiting),
            "retry_after_ratio": self._promises.ratio,
            **self.tally.counters(),
        }

    def _observe(self, account: Account) -> None:
        """Correct the model by how far a run is from its ideal, against what the model said meanwhile."""
        if account.ideal_ms > 0 and account.modelled.count:
            self._stretch.saw(account.key, account.spent_ms / account.ideal_ms, account.modelled.value)

    def _compare(self, account: Account, predicted: Footprint) -> None:
        self.tally.ended += 1
        self.tally.predicted_turns += predicted.turns
        self.tally.actual_turns += account.turns
        self.tally.predicted_tokens += predicted.peak_tokens
        self.tally.actual_tokens += account.peak_tokens

    @property
    def _engine(self) -> Engine:
        settings = self._settings
        return Engine(settings.slots, settings.host_bytes / settings.bytes_per_token, self._steps.ms, self._lost.times)

    # --- the decision -------------------------------------------------------------------------------------------

    def _limit(self, account: Account, now_ms: float) -> RefusalReason | None:
        """What stands against letting the run in now."""
        settings, ledger = self._settings, self.ledger
        if settings.admission is Admission.OFF or not len(ledger):
            return None
        if settings.admission is Admission.RUNS_CAP:
            return RefusalReason.CAP if ledger.likely >= settings.admission_cap else None
        if settings.admission is Admission.TURNS_CAP:
            in_flight = sum(other.in_flight for other in ledger.accounts.values() if other.admitted)
            return RefusalReason.CAP if in_flight >= settings.admission_cap else None
        if ledger.held_now < 1.0:
            return None
        laxer = self._laxer(account, now_ms)
        extra = ledger.load(account, now_ms)
        found = self._over(ledger.mixes(extra), self._objective(account) * laxer)
        if found is not None or not self._short_ms:
            return found
        return self._short_limit(account, ledger.mixes(extra), laxer)

    def _over(self, mixes: list[Mix], objective: float) -> RefusalReason | None:
        """Whether runs are predicted to miss a stretch objective, and what from."""
        worst = max(mixes, key=lambda mix: (lost_share(mix, self._engine), mix.active))
        predicted = pace(worst, self._engine)
        if self._stretch.expected(predicted.stretch) <= objective:
            return None
        held = pace(replace(worst, recompute_ms=0.0), self._engine)
        return RefusalReason.SPEED if self._stretch.expected(held.stretch) > objective else RefusalReason.MEMORY

    def _short_limit(self, account: Account, mixes: list[Mix], laxer: float) -> RefusalReason | None:
        allowed = self._settings.short_step_objective_ms
        now = self.ledger.mixes(None)
        if allowed is None or not now:
            return None
        ordered = sorted(self._short_ms)
        p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
        slower = pace(mixes[0], self._engine).turn_ms / max(1e-9, pace(now[0], self._engine).turn_ms)
        patience = min(self._patience(service) for service in self._classes(account))
        return RefusalReason.SHORT_STEPS if p95 * slower > allowed * patience * laxer else None

    def _classes(self, account: Account) -> list[ServiceClass]:
        """Whose objectives count: those of runs that are open, and of the new one."""
        return [s for s in ServiceClass if s is account.service or self.ledger.open_of(s)]

    def _objective(self, account: Account) -> float:
        return self._settings.stretch_objective * min(self._patience(s) for s in self._classes(account))

    def _patience(self, service: ServiceClass) -> float:
        return self._settings.batch_patience if service is ServiceClass.BATCH else 1.0

    def _laxer(self, account: Account, now_ms: float) -> float:
        """From 1 on, for a run that has waited long after it was predicted to be let in."""
        bound = max(LEAST_BOUND_MS, self._settings.max_wait_ms * self._patience(account.service))
        return max(1.0, (now_ms - account.arrived_ms) / (OVERDUE * bound))

    def _ahead_of(self, account: Account) -> Iterator[Account]:
        mine = _rank(account)
        return (other for other in self.waiting.values() if _rank(other) < mine)

    # --- waits --------------------------------------------------------------------------------------------------

    def _wait_ms(self, runs: float) -> float:
        """Until so many runs have ended."""
        if self._settings.admission is Admission.OFF:
            return 0.0
        rate = self.ledger.leaving
        if rate <= 0:
            return MOST_RETRY_S * 1e3
        return min(MOST_RETRY_S * 1e3, runs / rate * self._promises.ratio)

    def _too_many(self, account: Account) -> float:
        """How many of the open runs must end before the new one fits."""
        ledger, settings = self.ledger, self._settings
        if settings.admission in (Admission.RUNS_CAP, Admission.TURNS_CAP):
            return max(0.0, ledger.likely + 1.0 - settings.admission_cap)
        extra, objective = ledger.load(account, account.arrived_ms), self._objective(account)
        low, high = 0.0, 1.0
        for _ in range(6):
            middle = (low + high) / 2
            fits = self._over(ledger.mixes(extra, middle), objective) is None
            low, high = (middle, high) if fits else (low, middle)
        return max(0.5, (1.0 - low) * ledger.held_now)

    def _explain(self, account: Account, reason: RefusalReason, retry_s: float) -> str:
        """The refusal in words."""
        need = account.footprint(self._settings.slot_tokens)
        size = need.peak_tokens * self._settings.bytes_per_token
        footprint = f"about {need.turns:.0f} turns and {size / 1e6:,.0f} MB of KV"
        whys = {
            RefusalReason.MEMORY: "contexts of running loops would displace each other",
            RefusalReason.SPEED: "running loops would become slower than their objective",
            RefusalReason.SHORT_STEPS: "short steps of running loops would take longer than their objective",
            RefusalReason.CAP: f"{self._settings.admission_cap} are open, the most that are let in",
            RefusalReason.QUEUE_FULL: f"{len(self.waiting)} new runs are waiting already",
        }
        now = f"{len(self.ledger)} runs are open, and this one is expected to take {footprint}"
        return f"this new run is not let in now: {whys[reason]} ({now}); try again in {retry_s:.0f} s"


def _rank(account: Account) -> tuple[float, bool, RunKey]:
    late = BATCH_HANDICAP_MS if account.service is ServiceClass.BATCH else 0.0
    return account.arrived_ms + late, not account.root, account.key
