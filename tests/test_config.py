"""Settings: where they come from, what they refuse, and how they say so."""

from pathlib import Path

import pytest

from trunkline import cli, config
from trunkline.config import ConfigError, ServeSettings
from trunkline.core.types import Order, Sharing
from trunkline.wire.noise import DEFAULT, Normalizer


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80MB", 80_000_000),
        ("2GB", 2_000_000_000),
        ("512MiB", 512 * 2**20),
        ("1.5 gib", 3 * 2**29),
        ("1000", 1000),
        ("0", 0),
    ],
)
def test_sizes_parse(text: str, size: int) -> None:
    assert config.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "2XB", "1e9", "two"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="80MB"):
        config.parse_size(text)


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'port = 9000\nhost-bytes = "1GB"\nsharing = "off"\napi_keys = ["a", "b"]\nshare-cache-across-keys = true\n'
    )
    settings = config.load({"port": 9001}, file, {})
    assert (settings.port, settings.host_bytes, settings.sharing) == (9001, 10**9, Sharing.OFF)
    assert settings.api_keys == ("a", "b")
    assert settings.share_cache_across_keys
    assert settings.order is Order.SHORT_FIRST


def test_an_unknown_setting_names_the_nearest_known_one(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigError, match="did you mean port"):
        config.load({}, file, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port = [", "not valid TOML"),
        ("port = 'x'", "must be a number"),
        ("order = 'lifo'", "short_first or fcfs"),
        ("ctx = 3", "at least 64"),
        ("share_cache_across_keys = 1", "true or false"),
        ('model = ["a"]', "one value"),
        ("api_keys = [1]", "list of strings"),
        ('api_keys = [""]', "empty key"),
        ("[api_keys]", "list of strings"),
        ("drain_timeout_s = nan", "--drain-timeout-s"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        config.load({}, file, {})


@pytest.mark.parametrize(
    ("text", "names"),
    [("default", DEFAULT), ("none", ()), ("dates, billing,dates", (Normalizer.DATES, Normalizer.BILLING))],
)
def test_normalizers_are_named_in_a_list(tmp_path: Path, text: str, names: tuple[Normalizer, ...]) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f"normalize = '{text}'\n")
    assert config.load({}, file, {}).normalize == names
    assert config.convert("normalize", text) == names


def test_an_unknown_normalizer_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="billing, dates, tool_order, json_keys"):
        config.convert("normalize", "billing,noise")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        config.load({}, tmp_path / "none.toml", {})


def test_one_key_may_be_a_string_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('api_keys = "secret"\n')
    assert config.load({}, file, {}).api_keys == ("secret",)


def test_keys_may_come_from_the_environment() -> None:
    assert config.load({}, None, {"TRUNKLINE_API_KEYS": "a,b"}).api_keys == ("a", "b")
    assert config.load({"api_keys": ("c",)}, None, {"TRUNKLINE_API_KEYS": "a"}).api_keys == ("c",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"ctx": 10},
        {"disk_bytes": 1},
        {"threads": 0},
        {"gpu_layers": -2},
        {"flash_attention": "maybe"},
        {"prefill_share": 1.0},
        {"response_bytes": -1},
    ],
)
def test_values_out_of_range_name_their_option(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        ServeSettings(**wrong)  # type: ignore[arg-type]


def test_aliases_are_given_one_by_one_or_as_a_list(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model_aliases = ["gpt-x", "claude-x"]\nany_model = true\n')
    settings = config.load({}, file, {})
    assert (settings.model_aliases, settings.any_model) == (("gpt-x", "claude-x"), True)
    given = cli.parser().parse_args(["serve", "--model-alias", "a", "--model-alias", "b"])
    assert given.model_aliases == ["a", "b"]
    with pytest.raises(ConfigError, match="--model-alias"):
        ServeSettings(model_aliases=("",))


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text("1000000\n")
    assert config.machine_memory_bytes(tmp_path) == 1_000_000
    limit.write_text("max\n")
    assert config.machine_memory_bytes(tmp_path) > 1_000_000
