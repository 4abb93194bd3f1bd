"""`outpace.load` checks names, files and trust_remote_code before weights are read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace import loading
from outpace.draft.ngram import NGramDrafter
from outpace.models import hub
from outpace.models.packed import packed_bytes
from tests.gguf_file import write_gguf
from tests.tiny import byte_tokenizer, greedy, tiny

PROMPT = [3, 4, 5, 3, 4, 5]
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

(Path(MARKERS) / "ran").touch()


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig


class MineTokenizer(PreTrainedTokenizerFast):
    pass
"""


def saved(folder: Path, seed: int = 0) -> Path:
    tiny(vocab_size=272, seed=seed).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return saved(tmp_path / "good")


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return needing_code(tmp_path)


def needing_code(tmp_path: Path) -> Path:
    """Return a model with remote code, which creates a file `ran` when it runs."""
    folder = saved(tmp_path / "remote")
    maps = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    edited(folder / "config.json", model_type="mine", auto_map=maps)
    (folder / "mine.py").write_text(CODE.replace("MARKERS", repr(str(tmp_path))))
    return folder


def load_error(*arguments: Any, **options: Any) -> tuple[str, list[str]]:
    """Return the error of `load`, and the progress lines before it."""
    lines: list[str] = []
    with pytest.raises((ValueError, TypeError, OSError)) as raised:
        outpace.load(*arguments, device=options.pop("device", "cpu"), tell=lines.append, **options)
    return str(raised.value), lines


# trust_remote_code


@pytest.mark.parametrize("role", ["target", "draft", "tokenizer", "processor"])
def test_remote_code_does_not_run_by_default(remote: Path, good: Path, tmp_path: Path, role: str) -> None:
    if role == "tokenizer":
        edited(
            good / "tokenizer_config.json",
            tokenizer_class="MineTokenizer",
            auto_map={"AutoTokenizer": [None, "mine.MineTokenizer"]},
        )
        shutil.copy(remote / "mine.py", good)
    if role == "processor":
        with pytest.raises(ValueError, match="trust_remote_code=True") as raised:
            hub.load_processor(remote)
        why = str(raised.value)
    else:
        names = {"target": (remote, "lookup"), "draft": (good, remote), "tokenizer": (good, "lookup")}[role]
        why, _ = load_error(*names)
    assert why == (
        f"{good if role == 'tokenizer' else remote}: needs Python code of its own, which runs only if you "
        "allow it: --trust-remote-code, or trust_remote_code=True in Python"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.full
@pytest.mark.parametrize("role", ["--target", "--draft"])
def test_the_command_does_not_read_consent_from_stdin(
    remote: Path, good: Path, tmp_path: Path, role: str
) -> None:
    answers = tmp_path / "answers"
    answers.write_text("y\n" * 20)
    names = ["--target", str(good), role, str(remote)]  # the last of two counts
    with answers.open("rb", buffering=0) as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "outpace", "generate", "hi", *names],
            stdin=stdin,
            capture_output=True,
            text=True,
        )
        assert stdin.tell() == 0
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--trust-remote-code, or trust_remote_code=True" in line
    assert not (tmp_path / "ran").exists()


@pytest.mark.full
def test_the_flag_trust_remote_code_runs_the_code(remote: Path, tmp_path: Path) -> None:
    words = ["generate", "hi", "--raw", "-m", "2", "--target", str(remote), "--trust-remote-code"]
    done = subprocess.run([sys.executable, "-m", "outpace", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran").exists()


def test_remote_code_runs_with_trust_remote_code(remote: Path, good: Path, tmp_path: Path) -> None:
    decoder = outpace.load(
        remote,
        remote,
        device="cpu",
        dtype="float32",
        num_draft_tokens=3,
        trust_remote_code=True,
        tell=lambda line: None,
    )
    assert (tmp_path / "ran").exists()
    assert type(decoder.scorer.model).__name__ == "MineForCausalLM"
    out = decoder.generate(PROMPT, temperature=0, max_new_tokens=12)
    assert out.token_ids == greedy(tiny(vocab_size=272), PROMPT, 12)


def test_remote_code_that_is_not_needed_does_not_run(good: Path, remote: Path, tmp_path: Path) -> None:
    edited(good / "config.json", auto_map={"AutoModelForCausalLM": "mine.MineForCausalLM"})
    shutil.copy(remote / "mine.py", good)
    outpace.load(good, device="cpu", tell=lambda line: None)
    assert not (tmp_path / "ran").exists()


# Names and files


@pytest.mark.parametrize(
    ("draft", "meant"),
    [
        ("lokup", "lookup"),
        ("Lookup", "lookup"),
        ("non", "none"),
        ("ngram:", None),
        ("ngrm:a.st", "ngram:a.st"),
    ],
)
def test_a_misspelt_draft_is_refused_before_the_target_is_read(
    good: Path, monkeypatch: pytest.MonkeyPatch, draft: str, meant: str | None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    why, lines = load_error(good, draft)
    assert lines == []
    if meant:
        assert why == f'draft: {draft}: no such file, folder or hub model; did you mean "{meant}"?'
    else:
        assert why == "draft: .: no such file; save one with NGramDrafter.save"


def test_an_existing_model_with_a_name_close_to_lookup_is_loaded(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(good.parent)
    saved(Path("lokup"))
    loading.check_draft_name("lokup")
    assert outpace.load(good, "lokup", device="cpu", tell=lambda line: None).drafter is not None


def test_draft_ngram_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match="draft: ngram needs a file, ngram:FILE"):
        loading.check_draft_name("ngram")


def test_a_draft_missing_on_the_hub_is_refused_before_the_target_is_read(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    why, lines = load_error(good, "no-one/nothing")
    assert why.startswith("no-one/nothing: no such file or folder, and the hub cannot be reached")
    assert lines == []


def damage(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if how == "cut off":
        weights.write_bytes(whole[:-1])
    elif how == "cut off in its header":
        weights.write_bytes(whole[:100])
    elif how == "overwritten":
        weights.write_bytes(bytes(200) + whole[200:])
    else:
        weights.unlink()
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("how", ["cut off", "cut off in its header", "overwritten", "a shard is missing"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_damaged_weights_are_refused_before_other_weights_are_read(
    good: Path, tmp_path: Path, how: str, role: str
) -> None:
    bad = saved(tmp_path / "bad")
    damage(bad, how)
    why, lines = load_error(*((bad, good) if role == "target" else (good, bad)))
    assert why.startswith(f"{bad}: cannot be loaded (")
    assert lines == []


def test_a_damaged_gguf_draft_is_refused_before_the_target_is_read(good: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "draft.gguf")
    file.write_bytes(file.read_bytes()[:-100])
    why, lines = load_error(good, file)
    assert why.startswith(f"{file}: cannot be loaded, as it is damaged or cut off (its tensors end at byte ")
    assert lines == []


def table(path: Path, *, about: Any = None, drop: str = "", arrays: Mapping[str, Any] | None = None) -> Path:
    """Save an n-gram drafter with changes to its metadata or arrays."""
    from safetensors.numpy import load_file, save_file

    NGramDrafter.fit([1, 2, 3, 1, 2, 4] * 9, 2, 8).save(path)
    whole = {**load_file(path), **(arrays or {})}
    whole.pop(drop, None)
    header = {"kind": "ngram", "n": 2, "vocab_size": 8} if about is None else about
    save_file(whole, path, {"outpace": header if isinstance(header, str) else json.dumps(header)})
    return path


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drop": "counts.2"}, "it lacks the 2-grams"),
        ({"about": "{"}, "it has no header of outpace"),
        ({"about": {"kind": "ngram", "n": "2", "vocab_size": 8}}, "n 2, vocab_size 8"),
        ({"about": {"kind": "other", "n": 2, "vocab_size": 8}}, "it is of kind other"),
        ({"arrays": {"counts.2": torch.zeros(1).long().numpy()}}, "its 2-grams have shapes"),
        ({"arrays": {"counts.1": torch.ones(4).numpy()}}, "its 1-grams have shapes"),
    ],
)
def test_a_damaged_ngram_table_is_refused_before_the_target_is_read(
    good: Path, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    path = table(tmp_path / "table.safetensors", **changes)
    found, lines = load_error(good, f"ngram:{path}")
    assert found.startswith(f"draft: {path} holds no n-gram drafter ({why}")
    assert lines == []


def test_an_ngram_table_that_is_cut_off_or_out_of_order_is_refused(good: Path, tmp_path: Path) -> None:
    path = table(tmp_path / "table.safetensors")
    loading.check_draft_name(f"ngram:{path}")
    keys = torch.tensor([3, 2, 1, 0]).numpy()
    why, _ = load_error(good, f"ngram:{table(path, arrays={'keys.1': keys})}")
    assert why.endswith("holds no n-gram drafter (its n-grams are out of order)")
    why, _ = load_error(good, f"ngram:{table(path, arrays={'counts.1': 0 * keys})}")
    assert why.endswith("holds no n-gram drafter (it counts less than 1)")
    path.write_bytes(table(path).read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"draft: .* holds no n-gram drafter"):
        loading.check_draft_name(f"ngram:{path}")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"device": "gpu"}, "device: got 'gpu'"),
        ({"rule": "tokn"}, "rule: got 'tokn'"),
        ({"lenience": 2.0}, "lenience: got 2"),
        ({"device_map": "auto"}, "device: got 'cpu' together with device_map"),
        ({"revision": "v1"}, "revision: got 'v1'; it must be None for the local "),
        ({"device": None, "device_map": {"": "gpu"}}, "device_map: got 'gpu'"),
        ({"device": None, "device_map": "autp"}, "device_map: got 'autp'"),
        ({"quantization_config": "int8"}, "quantization_config: got 'int8'; it must be a quantization"),
    ],
)
def test_wrong_arguments_are_refused_before_weights_are_read(
    good: Path, options: dict[str, Any], why: str
) -> None:
    found, lines = load_error(good, good, **options)
    assert found.startswith(why)
    assert lines == []


def test_a_revision_of_the_default_model_is_refused() -> None:
    assert load_error(None, revision="v1")[0] == "revision: got 'v1'; it must be None for the default model"


def test_quantization_config_is_refused_for_a_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    why, lines = load_error(file, quantization_config={"quant_method": "torchao"})
    assert why == (
        f"quantization_config: got one for {file}; it must be None for a GGUF file, whose weights "
        "are loaded dense"
    )
    assert lines == []


# Arguments of Transformers


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", torch.float32),
        ("float", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_dtypes_have_short_names(name: Any, dtype: torch.dtype) -> None:
    assert hub.precision_of(name, torch.device("cpu")) == dtype


def test_the_error_for_a_wrong_dtype_lists_all_names() -> None:
    for wrong in ("int8", "nn", "", torch.int8):
        with pytest.raises(ValueError, match="dtype: got") as raised:
            hub.precision_of(wrong, torch.device("cpu"))
        assert all(f'"{name}"' in str(raised.value) for name in hub.DTYPES)


PARTS = (
    "model.embed_tokens",
    "model.layers.0",
    "model.layers.2",
    "model.norm",
    "model.rotary_emb",
    "lm_head",
)


@pytest.mark.parametrize(
    ("device_map", "places"),
    [
        ("auto", None),
        ("cpu", "cpu"),
        ({**dict.fromkeys(PARTS, "cpu"), "model.layers.1": "disk"}, "cpu, disk"),
        ({**dict.fromkeys((*PARTS, "model.layers.1"), "cpu"), "model.embed_tokens": "disk"}, "disk, cpu"),
    ],
)
def test_a_target_with_a_device_map_decodes(good: Path, device_map: Any, places: str | None) -> None:
    lines: list[str] = []
    decoder = outpace.load(
        good, good, device_map=device_map, dtype="float32", num_draft_tokens=3, tell=lines.append
    )
    assert lines[-1].startswith(f"{good}: float32 on {places or ''}")
    out = decoder.generate(PROMPT, temperature=0, max_new_tokens=12)
    assert out.token_ids == greedy(tiny(vocab_size=272), PROMPT, 12)


def test_quantized_weights_decode_as_in_transformers(good: Path) -> None:
    from transformers import AutoModelForCausalLM

    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    lines: list[str] = []
    decoder = outpace.load(
        good, device="cpu", dtype="float32", num_draft_tokens=3, quantization_config=config, tell=lines.append
    )
    assert lines == [f"{good}: float32, quantized by torchao on cpu"]
    reference = AutoModelForCausalLM.from_pretrained(
        good, dtype=torch.float32, device_map="cpu", quantization_config=config, trust_remote_code=False
    )
    assert "Int8" in type(reference.model.layers[0].mlp.up_proj.weight).__name__
    assert type(decoder.scorer.model.model.layers[0].mlp.up_proj.weight) is type(
        reference.model.layers[0].mlp.up_proj.weight
    )
    out = decoder.generate(PROMPT, temperature=0, max_new_tokens=12)
    assert out.token_ids == greedy(reference, PROMPT, 12)


@pytest.mark.full
def test_load_uses_the_requested_revision(tmp_path: Path) -> None:
    """Use a cache with the layout of the hub library, without a network."""
    repository = tmp_path / "hub" / "models--some--model"
    for seed, (name, commit) in enumerate({"main": "a" * 40, "v1": "b" * 40}.items()):
        saved(repository / "snapshots" / commit, seed)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    code = (
        "import sys, outpace\n"
        "from tests.tiny import greedy, tiny\n"
        "for seed, revision in ((0, None), (1, 'v1')):\n"
        "    decoder = outpace.load('some/model', device='cpu', dtype='fp32', revision=revision)\n"
        f"    out = decoder.generate({PROMPT}, temperature=0, max_new_tokens=8)\n"
        f"    assert out.token_ids == greedy(tiny(vocab_size=272, seed=seed), {PROMPT}, 8)\n"
        "outpace.load('some/model', device='cpu', revision='v2')\n"
    )
    root = Path(__file__).parents[1]
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = f"{root / 'src'}{os.pathsep}{root}"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("OSError: some/model: no such file or folder, and the hub")
    assert "AssertionError" not in done.stderr


def test_weights_are_packed_only_up_to_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(hidden_size=1024, num_hidden_layers=1)
    size = packed_bytes(model)
    assert size > 0
    assert loading.worth_packing(model)
    monkeypatch.setattr(loading, "MAX_PACKED_BYTES", size - 1)
    assert not loading.worth_packing(model)


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_older_gpus_get_float16_instead_of_emulated_bfloat16(
    native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda place: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native
    )
    assert hub.precision_of(None, torch.device("cuda")) is expected
