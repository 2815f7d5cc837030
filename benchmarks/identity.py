"""Identity without cooperation: whose turn each request is, with every header stripped.

    python benchmarks/identity.py [--data ../shared/data] [--only tau_bench,weka] [--json OUT]

Recorded agent runs are sent as concurrent agents would send them, interleaved, each turn after the answer to the one
before, to the production core: no model computes, answers are the recorded ones. Of some runs forks are made: a copy of
the history up to an answer, gone on with differently, or the same prompt once more, after the run itself has gone on.

A turn is right if it is in the run that its task's first turn began, and nobody else's. (Two tasks that sent and got
the same to the letter so far may change places: `twins`.) A fork is right if it is a run of its own, whose parent is
the run that it was forked from.

Text is tokenized by the packaged model's tokenizer. Weka sessions have no text: blocks are symbols, answers are spelled
where the next prompt holds them, and sessions whose tools and instructions have the same sizes share these blocks. What
an edited prompt (every 15th) says behind the edit is not recorded. It is taken to keep what was there, or what fits of
the newest, and the last answer (`weka`); or to say what nobody ever said, and no answer is ever sent back (`weka,
replayed`: what a replay harness sends; `heads apart`: one that takes block ids for each session's own).
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import identity_corpora as corpora
from identity_drive import Agent, Drive, Given
from measure import machine, say, write_json
from trunkline.core.types import Relation

FORKS = 200
SEED = 7


def score(givens: Sequence[Given]) -> dict[str, Any]:
    """How many turns and forks are right, and what the others were taken for."""
    home: dict[str, str] = {}
    owner: dict[str, str] = {}
    wrong: dict[str, int] = {}
    history: dict[str, int] = {}
    turns = right = forks = parents = twins = 0
    for given in givens:
        turns += 1
        other = owner.get(given.run)
        if given.task in home and other is not None and other != given.task and history[other] == history[given.task]:
            twins += 1  # nobody could tell the two apart until now
            owner[home[given.task]] = other
            owner[given.run], home[given.task], home[other] = given.task, given.run, home[given.task]
        history[given.task] = given.history
        if given.task not in home:
            home[given.task] = given.run
            problem = f"first turn taken for another run's ({given.relation})" if given.run in owner else ""
            owner.setdefault(given.run, given.task)
            if given.forked_from is not None:
                forks += 1
                good = not problem and given.parent == home[given.forked_from]
                parents += good
                problem = problem or ("" if good else f"fork taken for {given.relation} of another parent")
        elif given.run == home[given.task] and owner[given.run] == given.task:
            problem = ""
        elif given.run == home[given.task]:
            problem = "goes on in another task's run, as its first turn did"
        else:
            problem = f"taken for {given.relation} in {'another' if given.run in owner else 'a new'} run"
            owner.setdefault(given.run, given.task)
        right += not problem
        if problem:
            wrong[problem] = wrong.get(problem, 0) + 1
    return {
        "tasks": len(home) - forks,
        "turns": turns,
        "right": right / turns,
        "forks": forks,
        "twins": twins,
        "parents_right": parents / forks if forks else None,
        "relations": {str(kind): sum(given.relation is kind for given in givens) for kind in Relation},
        "wrong": dict(sorted(wrong.items(), key=lambda item: -item[1])),
    }


def measured(agents: Iterator[Agent], forks: int) -> dict[str, Any]:
    """Play the agents and score what the core made of them."""
    drive = Drive(seed=SEED, forks=forks)
    figures = score(drive.play(agents))
    arrivals = sorted(drive.arrival_ms)
    figures["arrival_ms_p50"] = arrivals[len(arrivals) // 2]
    figures["arrival_ms_p99"] = arrivals[int(len(arrivals) * 0.99)]
    return figures


def main() -> None:
    """Measure the corpora that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the corpora")
    parser.add_argument("--only", help="corpora, separated by commas (default: all that are there)")
    parser.add_argument("--limit", type=int, help="at most so many sessions a corpus")
    parser.add_argument("--forks", type=int, default=FORKS, help="forks to make of each corpus (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else None
    result: dict[str, Any] = {"machine": machine()}
    for name, agents in corpora.all_of(args.data, wanted, args.limit, SEED):
        figures = result[name] = measured(agents, args.forks)
        parents = "-" if figures["parents_right"] is None else f"{figures['parents_right']:.2%}"
        say(f"{name}: {figures['turns']:,} turns of {figures['tasks']} tasks: {figures['right']:.3%} in the right run;")
        say(f"    {figures['forks']} forks: {parents} with the right parent; {figures['relations']}")
        say(f"    an arrival takes {figures['arrival_ms_p50']:.2f} ms (p50), {figures['arrival_ms_p99']:.2f} ms (p99)")
        say(f"    {figures['twins']} times two tasks changed places that had been the same so far")
        for problem, count in figures["wrong"].items():
            say(f"    {count:>6} x {problem}")
    write_json(args.json, result)


if __name__ == "__main__":
    main()
