"""Client noise: reuse of noisy traffic with the noise normalized, against the same traffic without noise.

Served: agents of one kind, each a few turns with tools, on a fresh server for every line of the table. Each request
carries a new billing hash, or also a new time, another order of tools and of JSON keys. Reuse is cached / prompt tokens
from the second request on, as the server reports it. The first line is the same traffic without noise.

    python benchmarks/noise.py [--agents 3] [--turns 4] [--json OUT]

Recorded: with `--data FOLDER`, the requests of agentic-swarm-bench (the `scenarios/data` folder of its package) are put
through the gateway's normalizers and the core's prefix tree, without a model, since they hold up to 167,000 tokens.
Symbols are bytes of the rendered chat. *Held still* replaces the billing line by a constant: what a normalizer can
reach. Requests whose hash the recorder had held still itself (`cch=normalized`, 65 of 416) are left out.
"""

import argparse
import datetime
import functools
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import servers
from measure import machine, percentile, say, with_endpoint, write_json
from trunkline.bench.client import Endpoint
from trunkline.core.prefix import PrefixTree
from trunkline.core.types import Prompt
from trunkline.engine.template import ChatTemplate
from trunkline.gateway.noise import NoiseFilter
from trunkline.wire.noise import DEFAULT, Normalizer
from trunkline.wire.openai import Message

SLOTS, CTX, HOST_MIB = 4, 4096, 256
OUTPUT_TOKENS = 16
BILLING_LINE = "x-anthropic-billing-header: cc_version=2.1.104.583; cc_entrypoint=sdk-cli; cch={};"
RULES = " ".join(f"Rule {n}: keep changes small, and run the tests of part {n} before you go on." for n in range(12))
TOOL_NAMES = ("read_file", "write_file", "list_folder", "run_command", "search_text", "fetch_page")

# --- served -----------------------------------------------------------------------------------------------------------


class Noise:
    """What changes from request to request. `kinds` says what does; all else stays as it is without noise."""

    def __init__(self, kinds: frozenset[Normalizer], seed: int) -> None:
        self._kinds = kinds
        self._random = random.Random(seed)
        self._at = datetime.datetime(2026, 11, 30, 9, 10, 5, tzinfo=datetime.UTC)

    def system(self) -> str:
        """The system prompt of the next request."""
        cch = f"{self._random.randrange(16**5):05x}" if Normalizer.BILLING in self._kinds else "00000"
        if Normalizer.DATES in self._kinds:
            self._at += datetime.timedelta(seconds=self._random.randrange(1, 100_000))
        return f"{BILLING_LINE.format(cch)}\nYou are a coding agent. It is {self._at:%Y-%m-%d %H:%M:%S}. {RULES}"

    def tools(self) -> list[dict[str, Any]]:
        """Its tools."""
        names = list(TOOL_NAMES)
        if Normalizer.TOOL_ORDER in self._kinds:
            self._random.shuffle(names)
        return [{"type": "function", "function": self.keys(_function(name))} for name in names]

    def keys(self, value: dict[str, Any]) -> dict[str, Any]:
        """`value` with its keys in some order."""
        if Normalizer.JSON_KEYS not in self._kinds:
            return value
        names = list(value)
        self._random.shuffle(names)
        return {name: value[name] for name in names}


def _function(name: str) -> dict[str, Any]:
    properties = {"path": {"type": "string"}, "limit": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {"name": name, "description": f"The tool {name}: use it with care.", "parameters": parameters}


async def converse(endpoint: Endpoint, model: str, noise: Noise, agents: int, turns: int) -> dict[str, float]:
    """Agents one after another, turn by turn; returns what was cached."""
    prompt = cached = 0
    for agent in range(agents):
        history: list[dict[str, Any]] = [{"role": "user", "content": f"Task {agent}: find out why test {agent} fails."}]
        for turn in range(turns):
            messages = [{"role": "system", "content": noise.system()}, *map(functools.partial(_sent, noise), history)]
            body = {"model": model, "messages": messages, "tools": noise.tools(), "tool_choice": "none"}
            reply = await endpoint.generate(
                "/v1/chat/completions", body | {"max_tokens": OUTPUT_TOKENS, "temperature": 0}
            )
            if reply.error is not None:
                raise RuntimeError(reply.error)
            if agent or turn:
                prompt += reply.prompt_tokens
                cached += reply.cached_tokens or 0
            result = {
                "path": f"part_{turn}.py",
                "lines": 40 + turn,
                "text": f"def part_{turn}(): return {agent}",
                "ok": True,
            }
            history += [{"role": "assistant", "content": reply.text}, {"role": "tool", "content": result}]
    return {"prompt_tokens": prompt, "cached_tokens": cached, "reuse": cached / prompt}


def _sent(noise: Noise, message: dict[str, Any]) -> dict[str, Any]:
    """A message of the history as the client writes it this time."""
    if message["role"] != "tool":
        return message
    return {"role": "tool", "tool_call_id": "call", "content": json.dumps(noise.keys(message["content"]))}


def serve(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The table of served traffic."""
    every = frozenset(Normalizer)
    lines = (
        ("no noise", frozenset[Normalizer](), "none"),
        ("billing hash, default", frozenset({Normalizer.BILLING}), "default"),
        ("all noise, all normalizers", every, ",".join(Normalizer)),
        ("all noise, --normalize none", every, "none"),
    )
    rows: list[dict[str, Any]] = []
    for name, kinds, normalize in lines:
        flags = [*args.serve_flags.split(), "--normalize", normalize]
        size = {"slots": SLOTS, "ctx": CTX, "host_mib": HOST_MIB}
        with servers.trunkline_server(servers.find_model(args), **size, flags=flags) as url:
            work = functools.partial(converse, noise=Noise(kinds, 1), agents=args.agents, turns=args.turns)
            row = {"traffic": name, **with_endpoint(url, work)}
        rows.append(row)
        less = 100 * (rows[0]["reuse"] - row["reuse"])
        say(
            f"{name:28} {row['cached_tokens']:7,} of {row['prompt_tokens']:7,} cached, "
            f"{row['reuse']:.2%}: {less:.2f} points less than without noise"
        )
    return rows


# --- recorded ---------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
)
Settle = Callable[[list[Message]], Sequence[Message]]


def recorded(folder: Path) -> Iterator[tuple[str, list[Message]]]:
    """(recording, messages) of every request that has a billing line, each recording in its own order."""
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            raw = bytes(decoder.decode(line)["messages"])
            if b"x-anthropic-billing-header" in raw and b"cch=normalized;" not in raw:
                yield f"{path.parent.name}/{path.stem}", msgspec.json.decode(raw, type=list[Message])


def held_still(messages: list[Message]) -> list[Message]:
    """`messages` without what changes in the billing line."""
    first = messages[0]
    assert isinstance(first.content, str)
    line, _, rest = first.content.partition("\n")
    line = re.sub(r"cch=[^;]*;", "cch=;", re.sub(r"(cc_version=\d+\.\d+\.\d+)\.\w+;", r"\1;", line))
    return [msgspec.structs.replace(first, content=f"{line}\n{rest}"), *messages[1:]]


def replay(folder: Path) -> dict[str, Any]:
    """Reuse of the recorded requests: as sent, normalized, held still."""
    noise = NoiseFilter(DEFAULT)
    took_ms: list[float] = []

    def normalized(messages: list[Message]) -> Sequence[Message]:
        began = time.perf_counter()
        quiet = noise.settle("", messages, None)
        took_ms.append((time.perf_counter() - began) * 1e3)
        return quiet.messages

    ways: dict[str, Settle] = {"as sent": list, "normalized": normalized, "held still": held_still}
    template = ChatTemplate(TEMPLATE)
    rows = []
    for name, settle in ways.items():
        tree = PrefixTree()
        last: dict[str, bytes] = {}
        total = arrived = pairs = shared = requests = 0
        for recording, messages in recorded(folder):
            text = template.render([_plain(message) for message in settle(messages)], {}).encode()
            _, match, _ = tree.insert("", Prompt(np.frombuffer(text, np.uint8).astype(np.int32)))
            requests, total, arrived = requests + 1, total + len(text), arrived + match.tokens
            if recording in last:
                pairs, shared = pairs + len(last[recording]), shared + _common(last[recording], text)
            last[recording] = text
        row = {"way": name, "requests": requests, "with_the_last": shared / pairs, "with_all_before": arrived / total}
        say(
            f"{name:12} {requests} requests: {row['with_the_last']:7.2%} of the last prompt shared, "
            f"{row['with_all_before']:7.2%} of prompts had arrived"
        )
        rows.append(row)
    say(f"normalizing took {percentile(took_ms, 50):.3f} ms at p50, {percentile(took_ms, 95):.3f} ms at p95")
    return {"rows": rows, "normalize_ms_p50": percentile(took_ms, 50), "normalize_ms_p95": percentile(took_ms, 95)}


def _plain(message: Message) -> Mapping[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(message)
    return plain


def _common(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length))
    return int(differ[0]) if differ.size else length


def main() -> None:
    """Serve the traffic; replay the recording, if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    servers.add_arguments(parser)
    parser.add_argument("--agents", type=int, default=3, help="agents, one after another (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="turns of each (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="replay the recordings in this folder instead")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    result |= {"recorded": replay(args.data)} if args.data else {"served": serve(args), **servers.describe(args)}
    write_json(args.json, result)


if __name__ == "__main__":
    main()
