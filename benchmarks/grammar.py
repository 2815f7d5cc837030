"""What grammars cost and save: time for each chosen token, forced tokens, and whether all that is said is valid.

    python benchmarks/grammar.py [--data FOLDER] [--vocabulary smollm2|gemma] [--schemas N] [--json OUT]

`--data` is the `bfcl_v4` folder of the Berkeley function calling leaderboard: its functions become tool schemas;
without it, seeded ones are made. No model runs. Tool calls and answers with plausible values are followed token by
token under their grammar, as the engine does it; then `--schemas` seeded schemas are answered by random logits, and
every answer is checked with `jsonschema`.
"""

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import jsonschema
import numpy as np

from measure import machine, say, write_json
from trunkline.core.types import EndReason
from trunkline.engine.generation import Generation
from trunkline.engine.grammar import Grammars
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.turns import Constraint, ConstraintError, TurnRequest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.engine.schemas import RandomLogits, Schema, answer_under, random_schemas
from tests.engine.scripted_choice import ScriptedChoice
from tests.engine.vocabularies import vocabulary

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as models write it in tool calls, on one line."""
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
FORMATS = jsonschema.FormatChecker(("date", "email", "uuid", "ipv4"))
TOOLS_OF_NO_DATA = 60


@dataclass
class Tool:
    """A function that a model may call; `api` groups those that are offered together."""

    api: str
    name: str
    parameters: Schema
    response: Schema | None = None


@dataclass
class Kind:
    """What one kind of constrained step took. Times are milliseconds: of each chosen token, of each new grammar."""

    turns: int = 0
    tokens: int = 0
    forced: int = 0
    passes: int = 0
    token_ms: list[float] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Shares and percentiles."""
        p50, p95, p99, most = (float(np.percentile(self.token_ms, at)) for at in (50, 95, 99, 100))
        return {
            "turns": self.turns,
            "tokens": self.tokens,
            "forced_share": self.forced / self.tokens,
            "passes": self.passes,
            "saved_share": 1 - self.passes / self.tokens,
            "token_ms_p50": p50,
            "token_ms_p95": p95,
            "token_ms_p99": p99,
            "token_ms_max": most,
            "compile_ms_p95": float(np.percentile(self.compile_ms, 95)),
        }


def bfcl_tools(folder: Path) -> Iterator[Tool]:
    """The functions of a `bfcl_v4` folder."""
    for path in sorted((folder / "func_doc").glob("*.json.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            doc = json.loads(line)
            yield Tool(
                path.name,
                doc["name"],
                _schema(doc["parameters"]),
                _schema(doc["response"]) if "response" in doc else None,
            )


def made_tools(count: int) -> Iterator[Tool]:
    """Seeded functions of the same shape."""
    objects = (schema for schema in random_schemas(20 * count, seed=1) if schema.get("properties"))
    for at, schema in zip(range(count), objects, strict=False):
        yield Tool(f"api{at // 8}", f"function_{at}", schema)


def _schema(doc: Any) -> Schema:
    """A JSON schema of a BFCL type: its own names of types replaced, what is no keyword left out."""
    if isinstance(doc, list):  # several types of items
        return {"anyOf": [_schema(part) for part in doc]}
    kind = TYPES.get(doc.get("type"), doc.get("type", "string"))
    schema: Schema = {"type": kind}
    if kind == "object":
        schema["properties"] = {name: _schema(part) for name, part in doc.get("properties", {}).items()}
        schema["required"] = list(doc.get("required", schema["properties"]))
        schema["additionalProperties"] = False
    if kind == "array":
        schema["items"] = _schema(doc.get("items", {"type": "string"}))
    if kind in ("string", "integer") and "enum" in doc:
        schema["enum"] = doc["enum"]
    return schema


def call_of(tool: Tool) -> str:
    """The grammar of a call of `tool`, in Hermes' form."""
    parameters = json.dumps({**tool.parameters, "x-guidance": STYLE})
    head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f'{head} %json {parameters} "}}"'


def calls_of(tools: Sequence[Tool]) -> str:
    """The grammar of a call of any of `tools`."""
    return 'start: "<tool_call>\\n" (' + " | ".join(map(call_of, tools)) + ') "\\n</tool_call>"'


def plausible(schema: Schema, rng: np.random.Generator) -> Any:
    """A value that `schema` allows, with all that is required and some of the rest."""
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "anyOf" in schema:
        return plausible(schema["anyOf"][0], rng)
    match schema.get("type"):
        case "object":
            chosen = [n for n in schema.get("properties", {}) if n in schema.get("required", ()) or rng.random() < 0.3]
            return {name: plausible(schema["properties"][name], rng) for name in chosen}
        case "array":
            return [plausible(schema.get("items", {}), rng) for _ in range(2)]
        case "integer":
            return int(rng.integers(0, 100))
        case "number":
            return round(float(rng.random() * 100), 2)
        case "boolean":
            return bool(rng.random() < 0.5)
        case _:
            return " ".join(rng.choice(["final_report.pdf", "Lisbon", "quarterly", "review", "alex", "log.txt"], 2))


class Follower:
    """Follows given texts under grammars, one pass at a time."""

    def __init__(self, vocab: Vocabulary, grammars: Grammars) -> None:
        self._vocabulary = vocab
        self._grammars = grammars
        self._row = np.zeros(vocab.size, np.float32)
        self._text = ""
        self._script = ScriptedChoice(vocab, lambda _: self._text)
        self.kinds: dict[str, Kind] = {}

    def follow(self, kind: str, grammar: str, text: str) -> None:
        """Say `text` under `grammar`, and count."""
        constraint, tally = Constraint(grammar, kind), self.kinds.setdefault(kind, Kind())
        fresh, start = not self._grammars.knows(constraint), perf_counter()
        guide = self._grammars.guide(constraint)
        if fresh:
            tally.compile_ms.append((perf_counter() - start) * 1000)
        self._text = text
        request = TurnRequest(salt="", tokens=np.array([1], np.int32), text=None, max_tokens=4000)
        turn = Generation(request, self._vocabulary, guide, self._script)
        while turn.finished is None:
            before = turn.mask_ms
            turn.accept(self._row)
            tally.passes += 1
            tally.token_ms.append(turn.mask_ms - before)
        assert turn.visible_text == text, (turn.visible_text, text)
        tally.turns += 1
        tally.tokens += len(turn.tokens)
        tally.forced += turn.forced_tokens


def follow_tools(follower: Follower, tools: Sequence[Tool], rounds: int) -> None:
    """Calls of one named tool, of any tool of its API, and the same values under a schema and as free JSON."""
    rng = np.random.default_rng(0)
    apis = {tool.api: [other for other in tools if other.api == tool.api] for tool in tools}
    for _ in range(rounds):
        for tool in tools:
            arguments = json.dumps(plausible(tool.parameters, rng), ensure_ascii=False)
            call = f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": {arguments}}}\n</tool_call>'
            follower.follow("tool_call, named", calls_of([tool]), call)
            follower.follow("tool_call, any of an API", calls_of(apis[tool.api]), call)
            follower.follow(
                "json_object", f"start: %json {json.dumps({'type': 'object', 'x-guidance': STYLE})}", arguments
            )
            if tool.response is not None:
                answer = json.dumps(plausible(tool.response, rng), ensure_ascii=False)
                schema = json.dumps({**tool.response, "x-guidance": STYLE})
                follower.follow("json_schema", f"start: %json {schema}", answer)


def answer_schemas(vocab: Vocabulary, grammars: Grammars, schemas: Sequence[Schema]) -> dict[str, Any]:
    """How many schemas compile, how many answers end, how many of those are valid."""
    logits, counts, reasons = RandomLogits(vocab, 0), Counter[str](), Counter[str]()
    for schema in schemas:
        constraint = Constraint(f"start: %json {json.dumps(schema)}", "json_schema")
        try:
            grammars.guide(constraint)
        except ConstraintError as error:
            counts["refused"] += 1
            reasons[str(error).split(":")[0].split(" (at")[0]] += 1
            continue
        text, turn = answer_under(grammars, vocab, constraint, logits)
        if turn.finished is not EndReason.STOP:
            counts["cut"] += 1  # noise that never closed a string: `max_tokens` ended it
            continue
        counts["whole"] += 1
        try:
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))
            counts["valid"] += 1
        except (jsonschema.ValidationError, json.JSONDecodeError) as error:
            say(f"INVALID: {json.dumps(schema)}: {text!r}: {error}")
    return {"schemas": len(schemas), **counts, "reasons": dict(reasons.most_common(12))}


def main() -> int:
    """Run and report; 1 if an answer was invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a bfcl_v4 folder (default: seeded tools)")
    parser.add_argument("--vocabulary", choices=("smollm2", "gemma"), default="smollm2")
    parser.add_argument("--schemas", type=int, default=1000, help="seeded schemas to answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="calls of each tool (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    vocab = vocabulary(args.vocabulary)
    grammars = Grammars(vocab)
    tools = list(bfcl_tools(args.data) if args.data else made_tools(TOOLS_OF_NO_DATA))
    follower = Follower(vocab, grammars)
    follow_tools(follower, tools, args.rounds)
    kinds = {kind: tally.figures() for kind, tally in follower.kinds.items()}
    for kind, figures in kinds.items():
        say(f"{kind}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    own = [{**tool.parameters, "x-guidance": STYLE} for tool in tools]
    schemas = [*own, *random_schemas(args.schemas)][: args.schemas]
    answers = answer_schemas(vocab, grammars, schemas)
    say(f"schemas: {answers}")
    write_json(args.json, {"machine": machine(), "tools": len(tools), "kinds": kinds, "answers": answers})
    return int(answers.get("valid", 0) != answers.get("whole", 0))


if __name__ == "__main__":
    sys.exit(main())
