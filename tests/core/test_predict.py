"""Costs are learned from what calls took, on machines of any speed."""

import pytest

from trunkline.core.predict import LEAST, CostModel, LinearCost


@pytest.mark.parametrize("faster", [0.1, 1.0, 10.0, 50.0])
def test_calls_that_are_all_alike_are_predicted_as_they_were(faster: float) -> None:
    """Nothing tells the features of like calls apart and the prior is wrong; what comes next is known all the same."""
    costs = CostModel()
    for _ in range(200):
        costs.saw_decode(1, 100_000, 200.0 / faster)
        costs.saw_prefill(4096, 100_000, 5000.0 / faster)
    assert costs.decode_ms(1, 100_000) == pytest.approx(200.0 / faster, rel=0.05)
    assert costs.prefill_ms(4096, 100_000) == pytest.approx(5000.0 / faster, rel=0.05)


def test_a_machine_unlike_the_prior_is_learned_from_calls_of_many_sizes() -> None:
    costs = CostModel()
    for step in range(400):
        turns, context = 1 + step % 8, 1000 * (step % 50)
        costs.saw_decode(turns, context, 1.0 + 0.01 * turns + 1e-5 * context)
    assert costs.decode_ms(4, 20_000) == pytest.approx(1.24, rel=0.1)


def test_no_coefficient_falls_below_its_floor() -> None:
    cost = LinearCost((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    for step in range(100):
        cost.observe((1.0, float(step % 7), float(step % 3)), max(0.0, 5.0 - step % 7))
    for unit in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):
        assert cost.predict(unit) >= LEAST


def test_like_calls_reported_together_teach_what_they_teach_one_by_one() -> None:
    together, apart = CostModel(), CostModel()
    for _ in range(50):
        together.saw_decode(2, 500, 7.0, count=10)
    for _ in range(500):
        apart.saw_decode(2, 500, 7.0)
    assert together.decode_ms(3, 900) == pytest.approx(apart.decode_ms(3, 900))
