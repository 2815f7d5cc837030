"""A stateful model of the whole core: random agents, forks, edits, aborts and faults; every law after every step."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.core.fake_engine import FakeEngine
from trunkline.core.facts import CacheReset, RunFinished
from trunkline.core.invariants import check
from trunkline.core.types import Admission, CoreSettings, EndReason, Eviction, MemoryKind, Order, RunKey, Sharing

symbols = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class CoreMachine(RuleBasedStateMachine):
    """Agents over a three-symbol alphabet, so that prefixes collide all the time."""

    @initialize(
        slots=st.integers(1, 4),
        host_tokens=st.sampled_from([0, 8, 40, 400]),
        memory=st.sampled_from(MemoryKind),
        sharing=st.sampled_from([Sharing.TREE, Sharing.TREE, Sharing.TREE, Sharing.OFF]),
        eviction=st.sampled_from(Eviction),
        order=st.sampled_from([Order.SHORT_FIRST, Order.SHORT_FIRST, Order.FCFS]),
        slice_tokens=st.sampled_from([3, 16]),
        tree_symbols=st.sampled_from([60, 10_000]),
        admission=st.sampled_from(Admission),
    )
    def start(
        self,
        slots: int,
        host_tokens: int,
        memory: MemoryKind,
        sharing: Sharing,
        eviction: Eviction,
        order: Order,
        slice_tokens: int,
        tree_symbols: int,
        admission: Admission,
    ) -> None:
        self.engine = FakeEngine(
            CoreSettings(
                slots=slots,
                slot_tokens=64,
                host_bytes=host_tokens * 1000,
                bytes_per_token=1000,
                memory=memory,
                sharing=sharing,
                eviction=eviction,
                order=order,
                max_slice_tokens=slice_tokens,
                min_slice_tokens=1,
                max_tree_symbols=tree_symbols,
                admission=admission,
                admission_cap=2,
                stretch_objective=1.5,
            )
        )

    @rule(prompt=symbols, length=st.integers(1, 6), salt=st.sampled_from(["", "", "k"]), logprobs=st.booleans())
    def a_new_prompt_arrives(self, prompt: list[int], length: int, salt: str, logprobs: bool) -> None:
        self.engine.arrive(prompt, length=length, salt=salt, logprobs=logprobs and len(prompt) % 5 == 0)

    @rule(prompt=symbols, length=st.integers(1, 20), forced=st.lists(st.integers(0, 9), max_size=5))
    def a_prompt_with_a_grammar_arrives(self, prompt: list[int], length: int, forced: list[int]) -> None:
        self.engine.arrive(prompt, length=length, forced=forced)

    @precondition(lambda self: self.engine.histories)
    @rule(data=st.data(), more=symbols, length=st.integers(1, 6), named=st.booleans(), final=st.booleans())
    def a_run_continues(self, data: st.DataObject, more: list[int], length: int, named: bool, final: bool) -> None:
        run = data.draw(st.sampled_from(sorted(self.engine.histories)))
        history = self.engine.histories[run]
        self.engine.arrive(
            (history + more)[:56], length=length, run=run if named else None, final=final and length == 1
        )

    @precondition(lambda self: self.engine.histories)
    @rule(data=st.data(), more=symbols, branch=st.booleans())
    def a_history_is_left_midway(self, data: st.DataObject, more: list[int], branch: bool) -> None:
        run = data.draw(st.sampled_from(sorted(self.engine.histories)))
        history = self.engine.histories[run]
        cut = data.draw(st.integers(0, len(history)))
        self.engine.arrive((history[:cut] + more)[:56], parent=run if branch else None, run=None if branch else run)

    @rule(count=st.integers(1, 8))
    def the_engine_steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(ms=st.sampled_from([100.0, 10_000.0, 600_000.0]))
    def time_passes(self, ms: float) -> None:
        self.engine.now_ms += ms

    @precondition(lambda self: self.engine.jobs)
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        self.engine.end(data.draw(st.sampled_from(sorted(self.engine.jobs))), EndReason.ABORTED)

    @precondition(lambda self: self.engine.histories)
    @rule(data=st.data())
    def a_run_finishes(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.engine.histories)))
        self.engine.apply_actions(self.engine.core.handle(RunFinished(at_ms=self.engine.now_ms, key=RunKey("", run))))
        check(self.engine.core)

    @rule()
    def the_cache_is_reset(self) -> None:
        self.engine.apply_actions(self.engine.core.handle(CacheReset(at_ms=self.engine.now_ms)))
        check(self.engine.core)

    @rule(load=st.booleans())
    def a_fault_is_due(self, load: bool) -> None:
        if load:
            self.engine.fail_next_load = True
        else:
            self.engine.fail_next_call = True

    def everybody_ends(self) -> None:
        """Serve what is in flight; runs that are done say so, which lets in those that wait."""
        for step in range(10_000):
            if not self.engine.jobs:
                return
            if step % 40 == 0:
                for key in [run.key for run in self.engine.core.state.runs if run.turns and not run.in_flight]:
                    over = RunFinished(at_ms=self.engine.now_ms, key=key)
                    self.engine.apply_actions(self.engine.core.handle(over))
            self.engine.step()
        raise AssertionError(f"turns {sorted(self.engine.jobs)} never finished")

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.everybody_ends()
            for record in self.engine.records:
                if record.placed_ms is not None:
                    assert sum(miss.tokens for miss in record.misses) == record.novel_tokens
                if self.engine.settings.sharing is Sharing.OFF:
                    assert record.cached_tokens == 0


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
