"""A code-reading agent: an ordinary loop on the `openai` package, with nothing in it that knows which server answers.

It reads real files of a folder, one excerpt a turn. Each excerpt is appended to the conversation as the result of a
tool, the model's own answer becomes history, and the whole history goes with the next turn. Midway a sub-agent forks:
it takes a copy of the conversation, follows a task of its own in a thread beside its parent, and what it found joins
the parent's history.

    python examples/agent_loop.py --base-url http://127.0.0.1:8000
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

Conversation = list[ChatCompletionMessageParam]

SYSTEM = (
    "You read source code for a colleague who has no time to read it. For every excerpt you are shown, say in one or "
    "two short sentences what it does. Use what you saw in earlier excerpts. Do not repeat the code."
)
SUFFIXES = (".py", ".md", ".toml", ".c", ".h", ".cpp", ".js", ".ts", ".go", ".rs", ".java", ".txt")
EXCERPT_CHARACTERS = 1200
ANSWER_TOKENS = 48


class Agent:
    """One conversation with the model."""

    def __init__(self, client: OpenAI, model: str, name: str, messages: Conversation) -> None:
        self.client, self.model, self.name, self.messages = client, model, name, messages

    def turn(self, content: str, label: str) -> str:
        """Append `content`, let the model answer, append the answer and show both in one line."""
        self.messages.append({"role": "user", "content": content})
        began = time.monotonic()
        reply = self.client.chat.completions.create(
            model=self.model, messages=self.messages, max_tokens=ANSWER_TOKENS, temperature=0.7, seed=7
        )
        answer = reply.choices[0].message.content or ""
        self.messages.append({"role": "assistant", "content": answer})
        usage = reply.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
        tokens = f"{usage.prompt_tokens if usage else '?'} prompt tokens, {'?' if cached is None else cached} cached"
        print(f"[{self.name}] {label}: {tokens}, {time.monotonic() - began:.1f} s", flush=True)
        print(f"    {' '.join(answer.split())[:110]}", flush=True)
        return answer

    def fork(self, name: str) -> "Agent":
        """Another agent that knows what this one knows now."""
        return Agent(self.client, self.model, name, list(self.messages))


def read_file(path: Path, start: int) -> str:
    """The tool: an excerpt of a file, from line `start` (counted from 1), cut at a line's end."""
    lines = path.read_text(errors="replace").splitlines()[start - 1 :]
    excerpt = ""
    for line in lines:
        if len(excerpt) + len(line) > EXCERPT_CHARACTERS:
            break
        excerpt += line + "\n"
    return excerpt or lines[0][:EXCERPT_CHARACTERS]


def choose(folder: Path, count: int) -> list[Path]:
    """The longest text files of a folder, hidden and built ones left out."""
    skip = {"node_modules", "build", "dist", "__pycache__"}
    files = [
        path
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES and not any(p in skip or p[0] == "." for p in path.relative_to(folder).parts)
    ]
    longest = sorted((path for path in files if path.stat().st_size), key=lambda path: (-path.stat().st_size, path))
    return sorted(longest[:count])


def excerpt_turn(folder: Path, path: Path, start: int) -> tuple[str, str]:
    """What the tool's result looks like in the conversation, and a label for it."""
    label = f"read_file {path.relative_to(folder)}:{start}"
    return f"Result of {label}\n\n{read_file(path, start)}\nWhat does this part do?", label


def run_agent(client: OpenAI, folder: Path, turns: int) -> None:
    """The whole task: read, fork halfway, read on while the sub-agent works, join, conclude."""
    files = choose(folder, turns)
    if len(files) < 4:
        sys.exit(f"{folder} has {len(files)} text files; give --folder one with at least 4")
    model = client.models.list().data[0].id
    agent = Agent(client, model, "agent", [{"role": "system", "content": SYSTEM}])
    half = len(files) // 2
    for path in files[:half]:
        agent.turn(*excerpt_turn(folder, path, 1))
    with ThreadPoolExecutor(1) as threads:
        helper = threads.submit(run_sub_agent, agent.fork("sub-agent"), folder, files[half - 1])
        for path in files[half:]:
            agent.turn(*excerpt_turn(folder, path, 1))
        found = helper.result()
    agent.turn(f"A sub-agent read on in {files[half - 1].name} and found: {found}\n\nWhat should be read next?", "join")


def run_sub_agent(agent: Agent, folder: Path, path: Path) -> str:
    """The sub-agent's task: two later parts of one file, then a summary, which is returned."""
    time.sleep(0.2)  # it starts a moment after its parent went on, as a process of its own would
    lines = len(path.read_text(errors="replace").splitlines())
    for start in (lines // 3 + 1, 2 * lines // 3 + 1):
        agent.turn(*excerpt_turn(folder, path, start))
    return agent.turn(f"Sum up in one sentence what {path.name} is for.", "summary")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", default="none", help="sent as the bearer token")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent.parent, help="what to read")
    parser.add_argument("--turns", type=int, default=8, help="files to read, one a turn (default: %(default)s)")
    args = parser.parse_args()
    base_url = args.base_url.rstrip("/").removesuffix("/v1") + "/v1"
    try:
        run_agent(OpenAI(base_url=base_url, api_key=args.api_key), args.folder, args.turns)
    except APIConnectionError:
        sys.exit(f"no server answers at {base_url}; start one with `make serve`, or name it with --base-url")
    except APIStatusError as error:
        sys.exit(f"{base_url} answers {error.status_code}: {error.message}")


if __name__ == "__main__":
    main()
