"""Sampling: each parameter's meaning, against plain definitions written here."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from trunkline.core.types import Ints
from trunkline.engine.sampling import NO_IDS, Logits, Sampler, SamplingError, logprob
from trunkline.wire.turns import Sampling

GREEDY = Sampling(temperature=0)


def sampler(size: int, sampling: Sampling, prompt: tuple[int, ...] = (), suppressed: Ints = NO_IDS) -> Sampler:
    return Sampler(sampling, np.array(prompt, np.int32), size, suppressed)


def row(*logits: float) -> Logits:
    return np.array(logits, np.float32)


def chances(logits: Logits, sampling: Sampling) -> NDArray[np.float64]:
    """The distribution the parameters define, by sorting everything."""
    scores = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scores - scores.max())
    p /= p.sum()
    p[p < sampling.min_p * p.max() * (1 - 1e-6)] = 0
    order = np.argsort(-p, kind="stable")
    if sampling.top_k > 0:
        p[p < p[order[min(sampling.top_k, len(p)) - 1]]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    shares: NDArray[np.float64] = p / p.sum()
    return shares


@given(arrays(np.float32, 40, elements=st.integers(-3, 3)))
def test_greedy_takes_the_best_token_and_the_lowest_id_of_equals(logits: Logits) -> None:
    best = min(token for token in range(40) if logits[token] == logits.max())
    assert sampler(40, GREEDY).choose(logits) == best


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3),
        Sampling(seed=3, temperature=0.6),
        Sampling(seed=3, temperature=2.0),
        Sampling(seed=3, top_k=3),
        Sampling(seed=3, top_p=0.7),
        Sampling(seed=3, min_p=0.2),
        Sampling(seed=3, top_k=12, top_p=0.8, min_p=0.02, temperature=1.3),
    ],
)
@pytest.mark.parametrize("size", [20, 1500])
def test_tokens_come_as_often_as_the_parameters_say(sampling: Sampling, size: int) -> None:
    logits = np.random.default_rng(7).normal(0, 2, size).astype(np.float32)
    expected = chances(logits, sampling)
    drawn, draws = sampler(size, sampling), 6000
    counts = np.bincount([drawn.choose(logits) for _ in range(draws)], minlength=size)
    assert counts[expected == 0].sum() == 0
    # Pearson's statistic has the mean `kinds` and the variance 2 * `kinds`; rare tokens are taken together.
    often = expected * draws >= 5
    kinds = np.append(expected[often], expected[~often].sum()) * draws
    seen = np.append(counts[often], counts[~often].sum())
    statistic = float((((seen - kinds) ** 2)[kinds > 0] / kinds[kinds > 0]).sum())
    assert statistic < len(kinds) + 4 * math.sqrt(2 * len(kinds))


@given(
    arrays(np.float32, 600, elements=st.floats(-30, 30, width=32)),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(0, 700),
    st.floats(0.1, 3),
)
@settings(deadline=None)
def test_no_token_outside_the_filters_is_ever_drawn(
    logits: Logits, top_p: float, min_p: float, top_k: int, temperature: float
) -> None:
    logits = np.round(logits, 3)  # logits closer than float32 can tell apart are ties for all that anybody cares
    sampling = Sampling(top_p=top_p, min_p=min_p, top_k=top_k, temperature=temperature, seed=1)
    drawn = sampler(600, sampling)
    # Rounding may decide at the very edge of a nucleus: the reference is asked a hair more generously.
    wider = Sampling(
        top_p=min(1, top_p + 1e-4), min_p=max(0, min_p - 1e-4), top_k=top_k, temperature=temperature, seed=1
    )
    allowed = chances(logits, wider) > 0
    assert all(allowed[drawn.choose(logits)] for _ in range(20))


def test_top_p_of_zero_keeps_the_best_token_only() -> None:
    assert {sampler(3, Sampling(top_p=0.0, seed=seed)).choose(row(0, 1, 0.9)) for seed in range(30)} == {1}


def test_a_seed_reproduces_and_seeds_differ() -> None:
    flat = np.zeros(1000, np.float32)

    def draws(seed: int | None) -> list[int]:
        drawn = sampler(1000, Sampling(seed=seed))
        return [drawn.choose(flat) for _ in range(20)]

    assert draws(5) == draws(5)
    assert draws(-5) == draws(-5)
    assert len({tuple(draws(seed)) for seed in (0, 1, -1, 2**63, None, None)}) == 6


def test_repetition_penalty_counts_prompt_and_generated_tokens() -> None:
    penal = sampler(4, Sampling(temperature=0, repetition_penalty=2.0), prompt=(0, 0))
    logits = row(4, 3, 1.9, -9)
    assert [penal.choose(logits) for _ in range(3)] == [1, 0, 0]  # then 4/2, 3/2, 1.9: once counted, however often
    negative = sampler(2, Sampling(temperature=0, repetition_penalty=2.0), prompt=(0,))
    assert negative.choose(row(-1, -1.5)) == 1  # -1 becomes -2


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    presence = sampler(3, Sampling(temperature=0, presence_penalty=1.5), prompt=(0, 0, 0))
    assert [presence.choose(row(3, 2, -9)) for _ in range(4)] == [0, 1, 0, 0]  # 3, then 1.5 : 2, then 1.5 : 0.5
    frequency = sampler(3, Sampling(temperature=0, frequency_penalty=0.75), prompt=(0, 0, 0))
    assert [frequency.choose(row(3, 2, -9)) for _ in range(5)] == [0, 0, 1, 0, 1]


def test_negative_penalties_encourage_repetition() -> None:
    fond = sampler(2, Sampling(temperature=0, frequency_penalty=-1.0))
    assert fond.choose(row(0.5, 0)) == 0
    assert fond.choose(row(0, 0.9)) == 0


def test_logit_bias_forces_and_forbids() -> None:
    biased = sampler(4, Sampling(logit_bias=((2, 100.0), (0, -100.0)), seed=1))
    assert {biased.choose(row(5, 5, 0, 5)) for _ in range(50)} == {2}
    forbidding = sampler(3, Sampling(logit_bias=((0, -100.0),), seed=1))
    assert 0 not in {forbidding.choose(row(9, 1, 1)) for _ in range(50)}


def test_suppressed_tokens_are_never_chosen() -> None:
    never = np.array([1], np.int32)
    assert sampler(3, GREEDY, suppressed=never).choose(row(1, 9, 2)) == 2
    drawn = sampler(3, Sampling(seed=2, temperature=3.0), suppressed=never)
    assert 1 not in {drawn.choose(row(1, 9, 2)) for _ in range(100)}


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(repetition_penalty=1.3), Sampling(presence_penalty=1.0)])
def test_the_row_stays_as_it_was(sampling: Sampling) -> None:
    logits = row(1, 2, 3)
    logits.flags.writeable = False
    sampler(3, sampling, prompt=(2,)).choose(logits)
    assert logits.tolist() == [1, 2, 3]


@pytest.mark.parametrize("temperature", [1e-4, 1e-9, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    assert {sampler(3, Sampling(temperature=temperature, seed=n)).choose(row(1, 1.5, -3e38)) for n in range(20)} == {1}


@pytest.mark.parametrize("broken", [row(0, math.nan, 1), row(-math.inf, -math.inf, -math.inf)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(broken: Logits, temperature: float) -> None:
    with pytest.raises(SamplingError, match="no usable logits"):
        sampler(3, Sampling(temperature=temperature)).choose(broken)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(temperature=-1.0), "temperature is -1.0"),
        (Sampling(temperature=math.nan), "temperature is nan"),
        (Sampling(top_p=1.1), "top_p is 1.1"),
        (Sampling(min_p=-0.1), "min_p"),
        (Sampling(top_k=-2), "top_k"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty"),
        (Sampling(presence_penalty=math.inf), "presence_penalty"),
        (Sampling(logit_bias=((3, 1.0),)), "token 3: .* from 0 to 2"),
        (Sampling(logit_bias=((0, math.inf),)), "from -100 to 100"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(sampling: Sampling, message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        sampler(3, sampling)


@given(arrays(np.float32, 50, elements=st.floats(-40, 40, width=32)), st.integers(0, 49), st.integers(0, 60))
def test_log_probabilities_are_those_of_the_raw_logits(logits: Logits, token: int, top: int) -> None:
    exact = logits.astype(np.float64)
    expected = exact - (exact.max() + math.log(np.exp(exact - exact.max()).sum()))
    entry = logprob(logits, token, top)
    assert entry.token == token
    assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
    best = sorted(range(50), key=lambda i: (-logits[i], i))[:top]
    assert [i for i, _ in entry.top] == best
    assert [value for _, value in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-4)
