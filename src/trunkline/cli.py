"""The `trunkline` command: the composition root, where executors, core and gateway are put together."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from trunkline import __version__, config
from trunkline.bench import command as bench
from trunkline.config import ConfigError, ServeSettings
from trunkline.core.types import CoreSettings, MemoryKind, RunKey
from trunkline.engine.embedded import EmbeddedEngine, warm_up
from trunkline.engine.errors import EngineError
from trunkline.engine.memory import FlashAttention, Slots
from trunkline.engine.model import Model, load_model
from trunkline.engine.quantize import default_model
from trunkline.engine.sampling import Choosers, Sampler
from trunkline.engine.threads import Threads
from trunkline.gateway.app import build_app
from trunkline.gateway.records import RunRecords
from trunkline.gateway.responses.store import ResponseStore
from trunkline.gateway.rundb import RecordsError, RunReader, open_reader
from trunkline.gateway.server import listen, run_server
from trunkline.gateway.settings import GatewaySettings
from trunkline.sim import calibrate
from trunkline.sim import command as sim
from trunkline.trace import command as trace
from trunkline.wire import tables
from trunkline.wire.journal import Journal
from trunkline.wire.records import RunView
from trunkline.wire.traces import TraceError

RECORDS_FILE = "runs.sqlite"
RESPONSES_FILE = "responses.sqlite"
DEFAULT_SLOTS = 8
DEFAULT_CTX = 32_768
MAX_SLOTS = 64
PAD_TOKENS = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (ConfigError, EngineError, RecordsError, TraceError) as error:
        print(f"trunkline: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="trunkline",
        description="Serve agent runs: an OpenAI-compatible server that caches, schedules and reports by run.",
        epilog="Start with `trunkline serve`, point an OpenAI client at http://127.0.0.1:8000/v1, see `trunkline runs`",
    )
    root.add_argument("--version", action="version", version=f"trunkline {__version__}")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a model to agents", description="Serve a model to agents."))
    runs = commands.add_parser("runs", help="list runs", description="List runs, the latest first.")
    runs.add_argument("--limit", type=int, default=20, help="how many (default: %(default)s)")
    run = commands.add_parser("run", help="show one run", description="Show one run, turn by turn.")
    run.add_argument("id", help="the run's id, as `trunkline runs` and X-Trunkline-Run give it")
    run.add_argument(
        "--diff", type=int, metavar="TURN", help="show where a turn left the prefix it should have shared, and why"
    )
    for command, function in ((runs, show_runs), (run, show_run)):
        command.add_argument("--data-dir", type=Path, help="where the server keeps its records (default: as `serve`)")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=function)
    replay = commands.add_parser("bench", help="replay agent runs against any OpenAI-compatible server")
    bench.add_arguments(replay)
    replay.set_defaults(run=bench.run)
    simulate = commands.add_parser(
        "sim", help="simulate a node on a trace: how many agents, and what happens past that"
    )
    sim.add_arguments(simulate, _size)
    simulate.set_defaults(run=sim.run)
    fitted = commands.add_parser("calibrate", help="fit a node's costs to its decision log, for `sim --node`")
    calibrate.add_arguments(fitted)
    fitted.set_defaults(run=calibrate.run)
    trace.add_commands(commands.add_parser("trace", help="import, count, cut and export agent traces"), recorded_runs)
    return root


def _size(text: str) -> int:
    try:
        return config.parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# --- serve ----------------------------------------------------------------------------------------------------------


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="a TOML file with these settings")
    for spec in fields(ServeSettings):
        flag = "--" + spec.name.replace("_", "-")
        text = str(spec.metadata["help"])
        if spec.default not in (None, ()):
            text += f" (default: {','.join(spec.default) if isinstance(spec.default, tuple) else spec.default})"
        if spec.name in config.LISTS:
            one = config.LISTS[spec.name]
            parser.add_argument(one, action="append", dest=spec.name, default=argparse.SUPPRESS, help=text)
        elif spec.type is bool or str(spec.type) == "bool":
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(
                flag, metavar="SIZE" if spec.metadata.get("size") else "VALUE", default=argparse.SUPPRESS, help=text
            )
    parser.set_defaults(run=serve)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line names, converted."""
    given: dict[str, Any] = {}
    for spec in fields(ServeSettings):
        value = getattr(args, spec.name, None)
        if value is not None:
            given[spec.name] = config.convert(spec.name, value) if isinstance(value, str) else _frozen(value)
    return given


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def serve(args: argparse.Namespace, choosers: Callable[[Model], Choosers] = lambda _: Sampler) -> int:
    """Load a model and serve it until a signal. `choosers` makes what chooses the model's tokens."""
    logging.basicConfig(level=logging.INFO, format="trunkline: %(message)s", stream=sys.stderr)
    settings = config.load(_given(args), args.config)
    records = RunRecords(config.data_dir(settings) / RECORDS_FILE)
    try:
        path = settings.model or default_model(config.model_cache_dir(), _say)
        model = load_model(path, settings.gpu_layers)
        _say(f"loaded {model.name} from {path.name}")
        core = core_settings(settings, model)
        slots = _slots(settings, model, core)
        core = replace(core, memory=slots.kind)  # a layout that cannot be read is served with checkpoints
        warm_up(slots, model.n_vocab)
        journal = _journal(settings.decision_log, core)
        name = settings.model_name or (path.stem if settings.model else "smollm2-135m-instruct")
        engine = EmbeddedEngine(
            model, slots, core, name=name, sink=records.turn, journal=journal, choosers=choosers(model)
        )
        for run in records.all_open_runs():
            engine.restore_run(
                RunKey(run.salt, run.run),
                run.parent,
                run.turns,
                run.prompt_tokens,
                origin=run.origin,
                group=run.session,
                digest=run.digest,
            )
        engine.start()
        _say(_summary(core))
        try:
            with closing(_responses(settings)) as responses:
                _listen(settings, engine, records, responses)
        finally:
            engine.stop()
            if journal is not None:
                journal.close()
            slots.close()
            model.close()
    finally:
        records.close()
    return 0


def _responses(settings: ServeSettings) -> ResponseStore:
    # The lock of the run records, which lie beside them, keeps other servers away from these too.
    return ResponseStore(config.data_dir(settings) / RESPONSES_FILE, max_bytes=settings.response_bytes)


def _journal(path: Path | None, core: CoreSettings) -> Journal | None:
    try:
        return None if path is None else Journal(path, core)
    except OSError as error:
        raise ConfigError(f"--decision-log: cannot write {path}: {error.strerror}") from error


def core_settings(settings: ServeSettings, model: Model) -> CoreSettings:
    """Sizes for this model and machine: how long a context, how many slots. Raises `ConfigError`."""
    memory = config.machine_memory_bytes()
    budget = settings.kv_bytes if settings.kv_bytes is not None else memory // 4
    ctx = settings.ctx or min(model.n_ctx_train, DEFAULT_CTX)
    while settings.ctx is None and ctx > 4096 and budget // _slot_bytes(model, ctx) < DEFAULT_SLOTS // 2:
        ctx //= 2
    slot_bytes = _slot_bytes(model, ctx)
    limit = MAX_SLOTS if settings.kv_bytes is not None else DEFAULT_SLOTS
    count = min(limit, budget // slot_bytes)
    if count < 1:
        raise ConfigError(
            f"one slot of {ctx} tokens takes {slot_bytes / 1e6:.0f} MB, and --kv-bytes is {budget / 1e6:.0f} MB; "
            "raise --kv-bytes or lower --ctx"
        )
    return CoreSettings(
        slots=count,
        slot_tokens=ctx,
        host_bytes=settings.host_bytes if settings.host_bytes is not None else memory // 4,
        bytes_per_token=max(1, model.kv_bytes_per_token),
        checkpoint_bytes=model.checkpoint_bytes,
        memory=MemoryKind.CUTTABLE if model.cuttable else MemoryKind.CHECKPOINTS,
        sharing=settings.sharing,
        eviction=settings.eviction,
        order=settings.order,
        step_budget_ms=settings.step_budget_ms,
        prefill_share=settings.prefill_share,
        admission=settings.admission,
        admission_cap=settings.admission_cap,
        stretch_objective=settings.stretch_objective,
        short_step_objective_ms=settings.short_step_objective_ms,
        max_waiting_runs=settings.max_waiting_runs,
        max_wait_ms=settings.max_wait_s * 1e3,
    )


def _slot_bytes(model: Model, ctx: int) -> int:
    return max(1, _padded(ctx) * model.kv_bytes_per_token + model.checkpoint_bytes)


def _padded(ctx: int) -> int:
    return -(-ctx // PAD_TOKENS) * PAD_TOKENS


def _slots(settings: ServeSettings, model: Model, core: CoreSettings) -> Slots:
    flash = {"default": None, "on": FlashAttention.ON, "off": FlashAttention.OFF}[settings.flash_attention]
    threads = Threads(settings.threads, settings.threads) if settings.threads else None
    return Slots(model, slots=core.slots, slot_tokens=core.slot_tokens, threads=threads, flash_attention=flash)


def _listen(settings: ServeSettings, engine: EmbeddedEngine, records: RunRecords, responses: ResponseStore) -> None:
    gateway = GatewaySettings(
        api_keys=settings.api_keys,
        share_cache_across_keys=settings.share_cache_across_keys,
        normalize=settings.normalize,
        max_body_bytes=settings.max_body_bytes,
        drain_timeout_s=settings.drain_timeout_s,
        model_aliases=settings.model_aliases,
        any_model=settings.any_model,
    )
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port or --host"
        ) from error
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{listener.getsockname()[1]}"
    app = build_app(engine, records, gateway, responses)
    run_server(app, listener, lambda: print(f"trunkline: ready on {address}", flush=True))


def _summary(core: CoreSettings) -> str:
    kv = core.slots * (_padded(core.slot_tokens) * core.bytes_per_token + core.checkpoint_bytes)
    return (
        f"{core.slots} slots of {core.slot_tokens} tokens ({kv / 1e9:.2f} GB of KV), "
        f"{core.host_bytes / 1e9:.2f} GB of host memory for remembered prefixes"
    )


def _say(text: str) -> None:
    print(f"trunkline: {text}", file=sys.stderr, flush=True)


# --- runs -----------------------------------------------------------------------------------------------------------


def show_runs(args: argparse.Namespace) -> int:
    """Print the latest runs."""
    with _reader(args.data_dir) as reader:
        rows = reader.runs(None, args.limit)
    print(_json(rows) if args.json else tables.runs_table(rows))
    return 0


def show_run(args: argparse.Namespace) -> int:
    """Print one run, turn by turn."""
    with _reader(args.data_dir) as reader:
        view = reader.run(None, args.id)
    if view is None:
        raise ConfigError(f"no run {args.id!r} here; `trunkline runs` lists them")
    if args.diff is None:
        print(_json(view) if args.json else tables.run_table(view))
        return 0
    turn = next((turn for turn in view.turns if turn.index == args.diff), None)
    if turn is None:
        raise ConfigError(f"run {args.id!r} has no turn {args.diff}; `trunkline run {args.id}` lists them")
    print(_json(turn.diff) if args.json else tables.diff_text(view, turn))
    return 0


def recorded_runs(data_dir: Path | None, limit: int) -> Iterator[RunView]:
    """The latest `limit` runs that a server recorded, whole."""
    with _reader(data_dir) as reader:
        for row in reader.runs(None, limit):
            if (view := reader.run(None, row.id)) is not None:
                yield view


def _reader(data_dir: Path | None) -> "closing[RunReader]":
    folder = data_dir or config.default_data_dir()
    try:
        return closing(open_reader(folder / RECORDS_FILE))
    except FileNotFoundError as error:
        raise ConfigError(f"{error} Start `trunkline serve` first, or name its --data-dir.") from error


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


if __name__ == "__main__":
    sys.exit(main())
