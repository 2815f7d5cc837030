"""Reads tau-bench runs: a tool-calling agent serves a simulated customer; each run has a task, a trial and a reward.

Files are JSON lines, or one JSON array as the benchmark writes them. The tools of a domain are read from
`tools_DOMAIN.json` beside the file, where DOMAIN is a word of the file's name. There are no times. Few-shot files
(`messages_display`) are chats whose tool calls were left out; they have no task.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from trunkline.wire.chats import ChatMessage, chat_turns, read_whole, stem
from trunkline.wire.traces import Message, RunTrace, Tool, TraceError, read_lines, trace_files

_ROLE = re.compile(r"^(user|assistant|tool): ", re.MULTILINE)


class _Chat(msgspec.Struct):
    """A run (`task_id`, `trial`, `reward`, `traj`) or a few-shot chat (`messages_display`)."""

    task_id: int | str | None = None
    trial: int = 0
    reward: float | None = None
    traj: list[ChatMessage] | None = None
    messages_display: str | None = None


class _ToolFile(msgspec.Struct):
    function: Tool


_decode = msgspec.json.Decoder(_Chat).decode


def read_tau_bench(path: Path) -> Iterator[RunTrace]:
    """Runs of a file, or of every file in a folder but the tools'. Raises `TraceError`."""
    for file in trace_files(path, ".jsonl", ".json"):
        if not file.name.startswith("tools_"):
            domain, tools = _tools(file)
            for line, chat in _chats(file):
                yield _run(file, line, chat, domain, tools)


def _tools(file: Path) -> tuple[str, tuple[Tool, ...]]:
    """The file's domain and the domain's tools; without a tools file the domain is the file's name."""
    for beside in sorted(file.parent.glob("tools_*.json")):
        domain = beside.stem.removeprefix("tools_")
        if domain.lower() in file.name.lower():
            return domain, tuple(tool.function for tool in read_whole(beside, list[_ToolFile], "a list of tools"))
    return stem(file), ()


def _chats(file: Path) -> Iterator[tuple[int, _Chat]]:
    for number, line in read_lines(file):
        if number == 1 and line.startswith(b"["):
            yield from ((1, chat) for chat in read_whole(file, list[_Chat], "a list of tau-bench runs"))
            return
        try:
            yield number, _decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(file, number, f"not a tau-bench run: {error}") from error


def _run(file: Path, line: int, chat: _Chat, domain: str, tools: tuple[Tool, ...]) -> RunTrace:
    if chat.messages_display is not None:
        turns = tuple(chat_turns(_transcript(chat.messages_display)))
        note = "tool calls were not recorded"
        return RunTrace(id=f"{stem(file)}/{line}", kind=domain, source="tau_bench", turns=turns, tools=tools, note=note)
    if chat.traj is None or chat.task_id is None:
        raise TraceError(file, line, "not a tau-bench run: it needs `task_id` and `traj`, or `messages_display`")
    return RunTrace(
        id=f"{stem(file)}/task-{chat.task_id}/trial-{chat.trial}",
        kind=domain,
        source="tau_bench",
        turns=tuple(chat_turns([message.message() for message in chat.traj])),
        tools=tools,
        task=f"{domain}/{chat.task_id}",
        reward=chat.reward,
    )


def _transcript(text: str) -> list[Message]:
    """`role: words` a message. An assistant's `None` was a tool call."""
    _, *parts = _ROLE.split(text)
    return [
        Message(role, "" if (role, said.strip()) == ("assistant", "None") else said.strip())
        for role, said in zip(parts[::2], parts[1::2], strict=True)
    ]
