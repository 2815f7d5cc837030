"""The radix tree, by examples and against a model that keeps every sequence."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.core.helpers import prompt, tokens
from trunkline.core.prefix import Node, PrefixTree
from trunkline.core.types import Prompt

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=10)


def spelled(node: Node) -> list[int]:
    return [s for step in node.path() for s in step.symbols.tolist()]


def test_a_new_prompt_becomes_one_edge() -> None:
    leaf, match, split = PrefixTree().insert("", prompt(1, 2, 3))
    assert (leaf.start, leaf.end, match.tokens, split) == (0, 3, 0, None)


def test_a_fork_splits_the_edge_and_keeps_the_old_leaf() -> None:
    tree = PrefixTree()
    old, _, _ = tree.insert("", prompt(1, 2, 3, 4))
    new, match, split = tree.insert("", prompt(1, 2, 9))
    assert match.tokens == 2
    assert split is not None
    assert split.node is old
    assert split.tokens == 2
    assert old.parent is new.parent is split.upper
    assert spelled(old) == [1, 2, 3, 4]
    assert spelled(new) == [1, 2, 9]


def test_a_match_changes_nothing() -> None:
    tree = PrefixTree()
    leaf, _, _ = tree.insert("", prompt(1, 2, 3, 4))
    match = tree.match("", prompt(1, 2, 9))
    assert match.tokens == 2
    assert spelled(leaf) == [1, 2, 3, 4]
    assert leaf.parent is tree.root("")


def test_salts_share_nothing() -> None:
    tree = PrefixTree()
    tree.insert("a", prompt(1, 2, 3))
    assert tree.match("b", prompt(1, 2, 3)).tokens == 0


def test_blocks_count_their_weight() -> None:
    tree = PrefixTree()
    blocks = Prompt(np.array([7, 8, 9], np.int32), np.array([64, 64, 12], np.int32))
    leaf, _, _ = tree.insert("", blocks)
    assert leaf.end == blocks.tokens == 140
    longer = Prompt(np.array([7, 8, 5], np.int32), np.array([64, 64, 64], np.int32))
    assert tree.match("", longer).tokens == 128


def test_a_block_of_another_weight_is_another_block() -> None:
    tree = PrefixTree()
    tree.insert("", Prompt(np.array([7, 8], np.int32), np.array([64, 12], np.int32)))
    grown = Prompt(np.array([7, 8], np.int32), np.array([64, 64], np.int32))
    leaf, match, _ = tree.insert("", grown)
    assert match.tokens == 64
    assert leaf.end == 128


def test_a_continuing_run_matches_from_its_own_leaf() -> None:
    tree = PrefixTree()
    leaf, _, _ = tree.insert("", prompt(*tokens(50)))
    match = tree.match("", prompt(*tokens(60)), near=leaf)
    assert match.last is leaf
    assert match.tokens == 50


def test_a_leaf_that_the_prompt_left_does_not_mislead() -> None:
    tree = PrefixTree()
    leaf, _, _ = tree.insert("", prompt(1, 2, 3, 4))
    other, _, _ = tree.insert("", prompt(1, 2, 9))
    assert tree.match("", prompt(1, 2, 9, 5), near=leaf).last is other


def test_pruning_keeps_what_is_used_and_forgets_the_oldest() -> None:
    tree = PrefixTree()
    kept, _, _ = tree.insert("", prompt(1, 2, 3))
    old, _, _ = tree.insert("", prompt(4, 5, 6))
    new, _, _ = tree.insert("", prompt(7, 8, 9))
    old.used_ms, new.used_ms = 1.0, 2.0
    assert tree.prune(6, {kept.id}) == [old]
    assert tree.symbols == 6
    assert tree.match("", prompt(4, 5, 6)).tokens == 0


@given(sequences, st.integers(0, 12))
def test_cutting_at_a_token_ends_a_node_there(symbols: list[int], at: int) -> None:
    tree = PrefixTree()
    leaf, _, _ = tree.insert("", prompt(*symbols))
    upper, _ = tree.split_at_token(leaf, at)
    if at == 0:
        assert upper is None
    else:
        assert upper is not None
        assert spelled(upper) == symbols[:at]


class TreeMachine(RuleBasedStateMachine):
    """Against the list of all that was inserted."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.inserted: list[list[int]] = []

    @rule(symbols=sequences, from_leaf=st.booleans())
    def insert(self, symbols: list[int], from_leaf: bool) -> None:
        near = self.tree.match("", prompt(*self.inserted[-1])).last if from_leaf and self.inserted else None
        expected = max((_common(symbols, other) for other in self.inserted), default=0)
        leaf, match, _ = self.tree.insert("", prompt(*symbols), near)
        assert match.tokens == expected
        assert spelled(leaf) == symbols
        self.inserted.append(symbols)

    @rule(symbols=sequences, more=sequences)
    def extend(self, symbols: list[int], more: list[int]) -> None:
        leaf, _, _ = self.tree.insert("", prompt(*symbols))
        end, _ = self.tree.extend(leaf, np.array(more, np.int32))
        assert spelled(end) == symbols + more
        self.inserted.append(symbols + more)

    @rule(symbols=sequences)
    def match(self, symbols: list[int]) -> None:
        expected = max((_common(symbols, other) for other in self.inserted), default=0)
        assert self.tree.match("", prompt(*symbols)).tokens == expected

    @invariant()
    def every_distinct_prefix_is_there_once(self) -> None:
        distinct = {tuple(s[:n]) for s in self.inserted for n in range(1, len(s) + 1)}
        assert self.tree.symbols == len(distinct)


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_tokens_without_weights_are_symbols_of_weight_one() -> None:
    tree = PrefixTree()
    leaf, _, _ = tree.insert("", Prompt(np.array([7, 8], np.int32), np.array([64, 12], np.int32)))
    answered, _ = tree.extend(leaf, np.array([1, 2, 3], np.int32))
    longer = Prompt(np.array([7, 8, 1, 2, 9], np.int32), np.array([64, 12, 1, 1, 64], np.int32))
    assert tree.match("", longer).tokens == 64 + 12 + 2
    other = Prompt(np.array([7, 8, 1, 2], np.int32), np.array([64, 12, 1, 5], np.int32))
    assert tree.match("", other).tokens == 64 + 12 + 1
    again, split = tree.extend(leaf, np.array([1, 2, 3], np.int32))
    assert again is answered
    assert split is None
