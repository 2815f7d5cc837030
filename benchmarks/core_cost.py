"""What the policy core itself costs: microseconds a plan as runs grow, and the tree on a 100k-token prompt.

    python benchmarks/core_cost.py [--json OUT]

No engine runs: steps are reported done at once, so only decisions are timed. The share of a step is against the decode
step that the embedded engine measures (`--step-ms`, for the default model with one run at 512 tokens of context).
"""

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter, thread_time

import numpy as np

from trunkline.core.accounts import Account
from trunkline.core.admission import AdmissionControl
from trunkline.core.facts import MoveTiming, StepDone, TurnArrived, TurnEnded
from trunkline.core.policy import Core
from trunkline.core.predict import CostModel
from trunkline.core.prefix import PrefixTree
from trunkline.core.types import Admission, CoreSettings, EndReason, Prompt, RunKey, ServiceClass, TurnRecord

TURNS_BEFORE = 10
"""Turns that every run has behind it: its path in the tree has twice as many nodes."""


def arrived(turn: int, run: int, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]", at_ms: float) -> TurnArrived:
    """A turn of run `run`."""
    prompt = Prompt(tokens)
    return TurnArrived(
        at_ms=at_ms, turn=turn, salt="", prompt=prompt, max_new_tokens=1000, fresh=f"f{turn}", run=f"run-{run}"
    )


def plan_us(runs: int, slots: int, steps: int = 400) -> dict[str, float]:
    """Microseconds a plan, and a whole step (plan and report), with `runs` runs open and `slots` decoding."""
    rng = np.random.default_rng(0)
    settings = CoreSettings(slots=slots, slot_tokens=8192, host_bytes=10**12, bytes_per_token=1)
    core = Core(settings)
    histories = [rng.integers(0, 1000, 100, np.int32) for _ in range(runs)]
    now, turn = 0.0, 0
    for _ in range(TURNS_BEFORE):
        for run in range(runs):
            turn += 1
            core.handle(arrived(turn, run, histories[run], now))
            now = _until_decoding(core, turn, now)
            core.handle(TurnEnded(at_ms=now, turn=turn, reason=EndReason.STOP, generated=np.array([1], np.int32)))
            histories[run] = np.concatenate([histories[run], rng.integers(0, 1000, 50, np.int32)])
    for run in range(runs):
        turn += 1
        core.handle(arrived(turn, run, histories[run], now))
    plans, wholes = [], []
    for _ in range(steps):
        begin = perf_counter()
        plan = core.plan(now)
        planned = perf_counter()
        times = tuple(10.0 for _ in plan.calls)
        moves = tuple(_ok() for _ in plan.moves)
        core.handle(StepDone(at_ms=now + 10, plan=plan.seq, moves=moves, calls_ms=times))
        wholes.append((perf_counter() - begin) * 1e6)
        plans.append((planned - begin) * 1e6)
        now += 10
    return {"plan_p50": statistics.median(plans), "plan_p95": _p95(plans), "step_p50": statistics.median(wholes)}


def _until_decoding(core: Core, turn: int, now: float) -> float:
    while core.state.turns[turn].generated == 0:
        plan = core.plan(now)
        times = tuple(10.0 for _ in plan.calls)
        core.handle(StepDone(at_ms=now, plan=plan.seq, moves=tuple(_ok() for _ in plan.moves), calls_ms=times))
        now += 10
    return now


def _ok() -> MoveTiming:
    return MoveTiming(True, 1000, 1.0)


def _p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def tree_ms(tokens: int, repeats: int = 20) -> dict[str, float]:
    """Milliseconds to match and insert a new prompt of `tokens` tokens, and one that continues a long run."""
    rng = np.random.default_rng(1)
    new, continuing = [], []
    for _ in range(repeats):
        tree = PrefixTree()
        prompt = rng.integers(0, 50_000, tokens, np.int32)
        shared = prompt.copy()
        shared[tokens // 2] += 1
        tree.insert("", Prompt(shared))
        begin = perf_counter()
        leaf, _, _ = tree.insert("", Prompt(prompt))
        new.append((perf_counter() - begin) * 1e3)
        for _ in range(50):
            prompt = np.concatenate([prompt, rng.integers(0, 50_000, 500, np.int32)])
            leaf, _, _ = tree.insert("", Prompt(prompt), leaf)
        longer = np.concatenate([prompt, rng.integers(0, 50_000, 500, np.int32)])
        begin = perf_counter()
        tree.insert("", Prompt(longer), leaf)
        continuing.append((perf_counter() - begin) * 1e3)
    return {"new_ms": statistics.median(new), "continuing_ms": statistics.median(continuing)}


def admission_us(runs: int, repeats: int = 2000) -> dict[str, float]:
    """CPU microseconds to judge a new run (and refuse it), and to take in a turn of an open one, with `runs` open."""
    rng = np.random.default_rng(2)
    settings = CoreSettings(
        slots=64,
        slot_tokens=8192,
        host_bytes=10**9,
        bytes_per_token=1000,
        admission=Admission.PREDICTED,
        max_wait_ms=0.0,
    )
    control = AdmissionControl(settings, CostModel())
    symbols = np.arange(100, dtype=np.int32)
    now = 0.0

    def proposed(name: str) -> Account:
        kind = f"kind {rng.integers(100)}"
        return control.propose(RunKey("", name), now, kind, ServiceClass.INTERACTIVE, symbols, 1000, 1000)

    accounts = [proposed(f"run-{run}") for run in range(runs)]
    for account in accounts:
        control.enter(account, now, asked=False)
    judged, turns = [], []
    for number in range(repeats):
        now += 1.0
        begin = thread_time()
        control.look_again(now)
        refused = control.judge(proposed(f"new-{number}"), now)
        judged.append((thread_time() - begin) * 1e6)
        assert refused is not None or runs < settings.slots
        account = accounts[number % runs]
        record = TurnRecord(account.key, account.turns, now, 1000 + number, 900, 60_000.0, cached_tokens=900)
        record.completion_tokens = 50
        begin = thread_time()
        control.turn_arrived(account, now, record.prompt_tokens, 100, record.tool_gap_ms)
        control.turn_ended(account, record, 0.0, True, now + 100.0)
        turns.append((thread_time() - begin) * 1e6)
    return {"judge_p50": statistics.median(judged), "judge_p99": _p99(judged), "turn_p99": _p99(turns)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--step-ms", type=float, default=8.5, help="a decode step of the engine (default: %(default)s)")
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    print("runs in flight  slots   plan p50 us  p95 us   plan + report us   share of a step")
    for runs, slots in ((1, 8), (8, 8), (64, 8), (64, 64)):
        cost = plan_us(runs, slots)
        figures[f"{runs} runs, {slots} slots"] = cost
        share = cost["step_p50"] / 1000 / args.step_ms
        print(
            f"{runs:>14}  {slots:>5}   {cost['plan_p50']:>11.0f}  {cost['plan_p95']:>6.0f}   {cost['step_p50']:>16.0f}"
            f"   {share:.2%}"
        )
    tree = tree_ms(100_000)
    figures["tree, 100k tokens"] = tree
    print(f"match + insert, 100k tokens: new {tree['new_ms']:.2f} ms, continuing {tree['continuing_ms']:.2f} ms")
    for runs in (10, 1000, 10_000):
        cost = admission_us(runs)
        figures[f"admission, {runs} open runs"] = cost
        print(
            f"admission, {runs:>6,} open runs: judge p50 {cost['judge_p50']:.0f} us, p99 {cost['judge_p99']:.0f} us;"
            f" a turn's arrival and end p99 {cost['turn_p99']:.0f} us"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
