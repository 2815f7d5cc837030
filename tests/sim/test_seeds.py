"""A thousand seeds of everything that can go wrong (tests/sim/chaos.py); `make sim-hours` runs on."""

from pathlib import Path

import pytest

from tests.sim.chaos import Play, play, scenario
from trunkline.core.retention import Retention
from trunkline.wire.journal import Journal, replay

BATCHES = 20
SEEDS_A_BATCH = 50


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_seed_keeps_every_law_and_ends(batch: int) -> None:
    for seed in range(batch * SEEDS_A_BATCH, (batch + 1) * SEEDS_A_BATCH):
        try:
            play(seed)
        except Exception as error:
            error.add_note(f"seed {seed}: play({seed}) in tests/sim/chaos.py does it again")
            raise


ONCE_FAILED = {
    181: "a client left while its last turn ended well, and its run waited for ever",
    303: "a client left while its turn was being refused, and its run waited for ever",
    1000: "the same, after a restart of the node",
}


@pytest.mark.parametrize("seed", ONCE_FAILED, ids=lambda seed: f"{seed}: {ONCE_FAILED[seed]}")
def test_a_seed_that_failed_once_holds(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_a_seeds_decision_log_replays_to_the_same_plans(seed: int, tmp_path: Path) -> None:
    made = scenario(seed)
    journal = Journal(tmp_path / "log", made.settings)
    playing = Play(made, journal)
    playing.run()
    journal.close()
    plans = list(replay(tmp_path / "log"))
    assert len(plans) == playing.sim.node.plans
    assert all(logged == again for logged, again in plans)


def test_a_core_that_forgets_to_count_what_it_drops_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws can fail: a lost byte is found within a few seeds."""
    dropped = Retention.dropped

    def leaks(self: Retention, node: object) -> None:
        dropped(self, node)  # type: ignore[arg-type]
        self.host_bytes += 1

    monkeypatch.setattr(Retention, "dropped", leaks)
    with pytest.raises(AssertionError, match="bytes are conserved"):
        for seed in range(SEEDS_A_BATCH):
            play(seed)
