"""Stored responses: what is kept, for whom, how much, and over restarts."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from trunkline.gateway.responses.store import ResponseStore, Stored, conversation
from trunkline.gateway.rundb import DamagedRecords, NewerSchema
from trunkline.wire.responses import Item, ItemPart

SIZE = 1000


def make(id: str, previous: str | None = None, text: str = "hi", size: int = SIZE) -> Stored:
    """A response of about `size` bytes."""
    said = f'{{"type": "message", "id": "msg_{id}", "role": "assistant", "content": "yes"}}'
    padding = "x" * (size - 200)
    return Stored(id, previous, [user(text)], f'{{"output": [{said}], "padding": "{padding}"}}'.encode())


def user(text: str) -> Item:
    return Item(type="message", role="user", content=[ItemPart("input_text", text)])


@pytest.fixture
def store() -> Iterator[ResponseStore]:
    opened = ResponseStore(None, max_bytes=10 * SIZE, max_count=5)
    yield opened
    opened.close()


def kept(store: ResponseStore, ids: str) -> str:
    """Which of these one-letter ids are kept, once everything was written."""
    store.delete("", "nothing")
    return "".join(id for id in ids if store.get("", id))


def test_a_chain_is_the_whole_conversation_oldest_first(store: ResponseStore) -> None:
    store.put("", make("a", text="one"))
    store.put("", make("b", "a", text="two"))
    chain = store.chain("", "b")
    assert isinstance(chain, list)
    texts = [item.content if isinstance(item.content, str) else item.content[0].text for item in conversation(chain)]  # type: ignore[index]
    assert texts == ["one", "yes", "two", "yes"]


def test_a_chain_names_the_link_that_is_missing(store: ResponseStore) -> None:
    store.put("", make("b", "a"))
    assert store.chain("", "b") == "a"
    assert store.chain("", "c") == "c"


def test_a_response_is_seen_at_once_and_in_its_scope_only(store: ResponseStore) -> None:
    store.put("s", make("a"))
    assert store.get("s", "a") == make("a")
    assert store.get("t", "a") is None
    assert not store.delete("t", "a")
    assert store.get("s", "a") == make("a")
    assert store.get("t", "a") is None
    assert store.delete("s", "a")
    assert store.get("s", "a") is None
    assert not store.delete("s", "a")


def test_an_item_is_found_by_its_id_in_its_scope_as_long_as_its_response(store: ResponseStore) -> None:
    for _ in range(2):
        store.put("s", make("a"))
        found = store.item("s", "msg_a")
        assert found is not None and found.content == "yes"
        assert kept(store, "a") == ""
        assert store.item("s", "msg_a") == found
        assert store.item("t", "msg_a") is None
        assert store.item("s", "msg_b") is None
        assert store.delete("s", "a")
        assert store.item("s", "msg_a") is None


def test_beyond_the_count_what_was_made_first_goes_first(store: ResponseStore) -> None:
    for id in "abcdefg":
        store.put("", make(id))
    assert kept(store, "abcdefg") == "cdefg"


def test_beyond_the_bytes_what_was_made_first_goes_first() -> None:
    store = ResponseStore(None, max_bytes=3 * SIZE)
    for id in "abcd":
        store.put("", make(id, size=SIZE))
    survivors = kept(store, "abcd")
    assert survivors and survivors == "abcd"[-len(survivors) :]
    assert "a" not in survivors
    store.close()


def test_going_on_from_a_response_keeps_its_whole_chain(store: ResponseStore) -> None:
    store.put("", make("a"))
    store.put("", make("b", "a"))
    for id in "xy":
        store.put("", make(id))
    store.put("", make("c", "b"))
    store.put("", make("z"))
    assert kept(store, "abcxyz") == "abcyz"
    assert isinstance(store.chain("", "c"), list)


def test_a_deleted_response_makes_room(store: ResponseStore) -> None:
    for id in "abcde":
        store.put("", make(id))
    assert store.delete("", "e")
    store.put("", make("f"))
    assert kept(store, "abcdef") == "abcdf"


def test_a_response_larger_than_the_store_is_not_kept(store: ResponseStore) -> None:
    store.put("", make("a"))
    store.put("", make("b", size=11 * SIZE))
    assert kept(store, "ab") == "a"


def test_responses_survive_a_restart_and_stay_bounded(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    first = ResponseStore(path, max_bytes=10 * SIZE, max_count=3)
    for id in "abc":
        first.put("", make(id, text="é"))
    first.close()
    second = ResponseStore(path, max_bytes=10 * SIZE, max_count=3)
    assert second.get("", "a") == make("a", text="é")
    second.put("", make("d", "a"))
    assert kept(second, "abcd") == "acd"
    second.close()


def test_a_write_that_fails_is_logged_and_serving_goes_on(
    store: ResponseStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("", make("a"))
    assert kept(store, "a") == "a"
    store.put("", make("a", text="the same id again"))
    assert store.delete("", "a")
    assert "not stored" in caplog.text
    store.put("", make("b"))
    assert kept(store, "ab") == "b"


def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    with closing(sqlite3.connect(path)) as later:
        later.execute("PRAGMA user_version = 99")
    with pytest.raises(NewerSchema, match="schema 99"):
        ResponseStore(path, max_bytes=SIZE)


def test_a_damaged_file_is_named_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    path.write_bytes(b"no database" * 200)
    with pytest.raises(DamagedRecords, match="move it away"):
        ResponseStore(path, max_bytes=SIZE)
