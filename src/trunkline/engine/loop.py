"""The engine thread: receive facts, plan, apply, report. One loop owns the core and llama.cpp."""

import logging
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter

import numpy as np

from trunkline.core import actions as act
from trunkline.core.facts import (
    CacheReset,
    Fact,
    RunFinished,
    RunRestored,
    StepDone,
    TimePassed,
    TokensForced,
    TurnArrived,
    TurnEnded,
)
from trunkline.core.policy import Core
from trunkline.core.state import State
from trunkline.core.turns import Phase
from trunkline.core.types import CoreSettings, EndReason, Prompt, RunKey, TurnId, TurnRecord
from trunkline.engine.apply import Applier
from trunkline.engine.entry import declared, failed, verdict
from trunkline.engine.errors import DecodeFailed, EngineError
from trunkline.engine.generation import prompt_logprobs
from trunkline.engine.history import History
from trunkline.engine.live import LiveTurn
from trunkline.engine.memory import Slots
from trunkline.engine.rows import turn_row
from trunkline.engine.sampling import SamplingError
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.journal import Journal
from trunkline.wire.records import TurnRow
from trunkline.wire.turns import Accepted, Admitted, ConstraintError, Ended, Failed, Placed, PromptLogprobs, RunPlan

log = logging.getLogger("trunkline.engine")

Sink = Callable[[str, str, str | None, str, TurnRow], None]
"""Takes (salt, run, parent, origin, row) of every turn that ended; thread-safe."""
IDLE_POLL_S = 0.5
SHUTTING_DOWN = Failed(503, "shutting_down", "the server is shutting down; send the request again")


class EngineLoop:
    """Serves turns on its own thread. `submit`, `cancel` and the other requests may be called from any thread."""

    def __init__(
        self,
        slots: Slots,
        settings: CoreSettings,
        vocabulary: Vocabulary,
        history: History,
        *,
        node: str,
        sink: Sink,
        journal: Journal | None = None,
    ) -> None:
        self._settings = settings
        self._core = Core(settings)
        self._applier = Applier(slots)
        self._vocabulary = vocabulary
        self._history = history
        self._node = node
        self._sink = sink
        self._journal = journal
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._live: dict[TurnId, LiveTurn] = {}
        self._ended: list[tuple[LiveTurn, EndReason]] = []
        self._forced: list[tuple[TurnId, int]] = []
        self._records: dict[TurnId, TurnRecord] = {}
        self._stopping = self._stopped = False
        self._deaths = 0
        self._start_overs = 0
        self.gauges: dict[str, float] = {}
        self.failure: str | None = None
        self._thread = Thread(target=self._run, name="trunkline-engine", daemon=True)

    # --- any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step in progress; turns in flight fail."""
        self._inbox.put(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def state(self) -> State:
        """What decisions rest on. Other threads may take single looks at it."""
        return self._core.state

    @property
    def alive(self) -> bool:
        """Whether turns are being served."""
        return self._thread.is_alive() and not self._stopped

    def submit(self, live: LiveTurn) -> None:
        """Serve a turn; its events go to `live.emit`."""
        self._inbox.put(lambda: self._arrive(live))
        if self._stopped:
            self._refuse_all()

    def cancel(self, turn: TurnId) -> None:
        """Nobody waits for this turn any more."""
        self._inbox.put(lambda: self._abort(turn))

    def declare(self, key: RunKey, plan: RunPlan, answer: Callable[[Admitted | Failed], None]) -> None:
        """A run was announced; `answer` is told, on the engine thread, whether it is let in."""
        self._inbox.put(lambda: self._declare(key, plan, answer))
        if self._stopped:
            self._refuse_all()

    def finish(self, key: RunKey) -> None:
        """A run is over."""
        self._inbox.put(lambda: self._tell(RunFinished(at_ms=now_ms(), key=key)))

    def restore(self, fact: RunRestored) -> None:
        """A run is known from an earlier process."""
        self._inbox.put(lambda: self._tell(fact))

    def reset(self) -> None:
        """Forget every prefix that no turn in flight uses."""
        self._inbox.put(lambda: self._tell(CacheReset(at_ms=now_ms())))

    # --- the engine thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn_the_wheel()
                except Exception as error:
                    self._start_over(error)
        except Exception as error:
            log.exception("the engine stopped")
            self.failure = f"the engine stopped ({type(error).__name__}: {error}); restart the server"
        finally:
            self._stopping = self._stopped = True
            self._refuse_all()

    def _turn_the_wheel(self) -> None:
        self._receive()
        if now_ms() >= self._core.due_ms:
            self._tell(TimePassed(at_ms=now_ms()))
        plan = self._plan()
        if plan.moves or plan.calls:
            self._apply(plan)
        else:
            self._publish()
            self._wait()

    def _refuse_all(self) -> None:
        """Nobody is left waiting: turns in flight and turns in the inbox are told."""
        self._receive()
        while self._live:
            _, live = self._live.popitem()
            live.emit(SHUTTING_DOWN)

    def _receive(self) -> None:
        while True:
            try:
                self._inbox.get_nowait()()
            except Empty:
                return

    def _wait(self) -> None:
        try:
            self._inbox.get(timeout=IDLE_POLL_S)()
        except Empty:
            return

    def _plan(self) -> act.StepPlan:
        at = now_ms()
        plan = self._core.plan(at)
        if self._journal is not None and (plan.moves or plan.calls):
            self._journal.plan(plan)
        self._deaths += len(plan.deaths)
        return plan

    def _apply(self, plan: act.StepPlan) -> None:
        moves = tuple(self._applier.move(move) for move in plan.moves)
        unusable = {
            move.slot for move, t in zip(plan.moves, moves, strict=True) if isinstance(move, act.Load) and not t.ok
        }
        times = tuple(self._call(call, unusable) for call in plan.calls)
        self._tell(StepDone(at_ms=now_ms(), plan=plan.seq, moves=moves, calls_ms=times))
        forced, self._forced = self._forced, []
        for turn, count in forced:
            self._tell(TokensForced(at_ms=now_ms(), turn=turn, tokens=count))
        ended, self._ended = self._ended, []
        for live, reason in ended:
            self._end(live, reason)
        if self._journal is not None:
            self._journal.flush()
        self._publish()

    def _call(self, call: act.Call, unusable: set[int]) -> float:
        if isinstance(call, act.Prefill) and call.slot in unusable:
            return -1.0
        turns = [turn for turn, _ in call.turns] if isinstance(call, act.Decode) else [call.turn]
        try:
            ms = self._applier.call(call, self._live)
        except DecodeFailed as error:
            log.error("a step failed: %s", error)
            self._ended += [(self._live[turn], EndReason.FAILED) for turn in turns]
            return -1.0
        if isinstance(call, act.Prefill):
            self._prefilled(call)
        elif isinstance(call, act.Decode) or call.last:
            for row, turn in enumerate(turns):
                self._sample(self._live[turn], row)
        return ms

    def _prefilled(self, call: act.Prefill) -> None:
        live = self._live[call.turn]
        if not live.placed:
            live.placed = True
            live.emit(Placed(self._core.state.turns[live.id].record.cached_tokens))
        rows = call.end - call.start
        if live.request.prompt_logprobs:
            logits = np.stack([self._applier.slots.logits(i) for i in range(rows)])
            following = live.prompt[call.start + 1 : call.end + 1]
            live.prompt_entries += prompt_logprobs(logits[: len(following)], following, live.request.logprobs or 0)
            if call.last:
                live.emit(PromptLogprobs((None, *live.prompt_entries)))
        if call.last:
            self._sample(live, rows - 1 if live.request.prompt_logprobs else 0)

    def _sample(self, live: LiveTurn, row: int) -> None:
        try:
            delta = live.generation.accept(self._applier.slots.logits(row))
        except (SamplingError, ConstraintError) as error:
            live.failure = Failed(400, "invalid_value", str(error))
            self._ended.append((live, EndReason.FAILED))
            return
        live.emit(delta)
        if len(delta.tokens) > 1:
            self._forced.append((live.id, len(delta.tokens) - 1))
        if live.generation.finished is not None:
            self._ended.append((live, live.generation.finished))

    # --- turns ------------------------------------------------------------------------------------------------

    def _arrive(self, live: LiveTurn) -> None:
        if self._stopping:
            live.emit(SHUTTING_DOWN)
            return
        hint, request = live.request.hint, live.request
        self._live[live.id] = live
        self._tell(
            TurnArrived(
                at_ms=now_ms(),
                turn=live.id,
                salt=request.salt,
                prompt=Prompt(request.tokens),
                max_new_tokens=request.max_tokens,
                fresh=live.fresh,
                run=hint.run,
                group=hint.group,
                parent=hint.parent,
                origin=hint.origin,
                final=hint.final,
                needs_prompt_logits=request.prompt_logprobs,
                kind=request.kind,
                service=hint.service,
                opening=live.opening,
            )
        )

    def _declare(self, key: RunKey, plan: RunPlan, answer: Callable[[Admitted | Failed], None]) -> None:
        answer(SHUTTING_DOWN if self._stopping else verdict(self._tell(declared(now_ms(), key, plan))))

    def _abort(self, turn: TurnId) -> None:
        live = self._live.get(turn)
        if live is not None:
            self._end(live, EndReason.ABORTED)

    def _end(self, live: LiveTurn, reason: EndReason) -> None:
        if live.id not in self._live:
            return
        generation, request = live.generation, live.request
        run = self._core.state.turns[live.id].run
        if reason is not EndReason.FAILED:
            self._history.remember(
                salt=request.salt,
                text=request.text,
                prompt=request.tokens,
                generated=generation.tokens,
                visible=generation.visible_text,
                shown=generation.shown_control,
            )
        generated = np.array(generation.tokens, np.int32)
        self._tell(TurnEnded(at_ms=now_ms(), turn=live.id, reason=reason, generated=generated))
        record = self._records.pop(live.id)
        row = turn_row(record, live, self._node, self._vocabulary)
        self._sink(run.key.salt, run.key.run, run.parent, run.origin, row)
        if reason is EndReason.FAILED:
            live.emit(live.failure)
        else:
            live.emit(Ended(reason, row, generation.stopped_by))
        del self._live[live.id]

    def _tell(self, fact: Fact) -> list[act.Action]:
        if self._stopped:
            return []
        if self._journal is not None:
            self._journal.fact(fact)
        actions = self._core.handle(fact)
        for action in actions:
            match action:
                case act.TurnAccepted(turn, key, index, parent):
                    self._live[turn].emit(Accepted(key.run, index, parent))
                case act.TurnRefused():
                    self._live.pop(action.turn).emit(failed(action))
                case act.TurnRecorded(turn, record):
                    self._records[turn] = record
                case act.DeathNotice():
                    self._deaths += 1
                case act.RunAdmitted() | act.RunRefused():
                    pass
                case _:
                    self._applier.action(action)
        return actions

    # --- trouble and reports ----------------------------------------------------------------------------------

    def _start_over(self, error: Exception) -> None:
        """Something went wrong that no plan foresaw: fail what is in flight, forget all KV, go on."""
        log.exception("the engine starts over; turns in flight fail and cached prefixes are lost", exc_info=error)
        self._start_overs += 1
        message = f"the engine had to start over ({type(error).__name__}); send the request again"
        for live in list(self._live.values()):
            live.emit(Failed(500, "engine_restarted", message))
        at = now_ms()
        known = [
            RunRestored(
                at_ms=at,
                key=run.key,
                parent=run.parent,
                turns=run.turns,
                prompt_tokens=run.leaf.end if run.leaf is not None else 0,
                origin=run.origin,
                finished=run.finished,
                group=run.group,
                digest=str(run.digest) if run.digest is not None else "",
            )
            for run in self._core.state.runs
        ]
        self._live.clear()
        self._ended.clear()
        self._forced.clear()
        self._records.clear()
        try:
            self._applier.empty()
        except EngineError as worse:
            self.failure = f"llama.cpp cannot be used any more ({worse}); restart the server"
            self._stopping = True
            return
        self._core = Core(self._settings)
        if self._journal is not None:
            self._journal.begin(self._settings)
        for fact in known:
            self._tell(fact)
        self._publish()

    def _stop(self) -> None:
        self._stopping = True

    def _publish(self) -> None:
        state = self._core.state
        queued = sum(turn.phase is Phase.QUEUED for turn in state.turns.values())
        held = sum(slot.held for slot in state.slots)
        self.gauges = {
            "running": len(state.turns) - queued,
            "waiting": queued,
            "slots": len(state.slots),
            "kv_used_fraction": held / (len(state.slots) * self._settings.slot_tokens),
            "kv_capacity_tokens": len(state.slots) * self._settings.slot_tokens,
            "host_bytes": state.retention.host_bytes,
            "host_budget_bytes": self._settings.host_bytes,
            "runs_remembered": len(state.runs),
            "tree_symbols": state.tree.symbols,
            "broken_promises_total": state.broken_promises,
            "deaths_total": self._deaths,
            "engine_start_overs_total": self._start_overs,
            **state.admission.gauges(),
        }


def now_ms() -> float:
    """The engine's clock, in milliseconds from an arbitrary origin."""
    return perf_counter() * 1000
