"""A server with the engine in it."""

import json
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli._app import AsJson, app, console, print_rows


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="smollm2, random:llama-8layer, a folder or a hub name.")],
    port: Annotated[int, typer.Option(help="On 127.0.0.1; 0 for a free one.")] = 8000,
    config: Annotated[Path | None, typer.Option(help="A YAML file of cache settings; options go before it.")] = None,
    memory: Annotated[str | None, typer.Option(help='Budget of the memory tier, as "4GiB".')] = None,
    disk: Annotated[Path | None, typer.Option(help="Folder of the disk tier.")] = None,
    redis: Annotated[str | None, typer.Option(help="redis://host:port/0 of the Redis tier.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens of a chunk.")] = None,
    policy: Annotated[str | None, typer.Option(help="Eviction order of the memory tier.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="vLLM's own prefix cache before the tiers.")] = True,
    threads: Annotated[int, typer.Option(help="Compute threads; 0 for all cores.")] = 0,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and answer; the model's by default.")
    ] = None,
    kv_memory: Annotated[str, typer.Option(help="vLLM's own KV memory.")] = "1GiB",
    as_json: AsJson = False,
) -> None:
    """Start vLLM's OpenAI-compatible server with the cache in it; Ctrl-C stops it.

    It answers at /v1/completions, /v1/chat/completions, /health and /metrics of the address that is printed.

    Example: `kvworkbench serve smollm2 --memory 4GiB --disk /var/cache/kv`
    """
    from experiments.models import resolve_model
    from experiments.server import ServerProcess

    asked = {"memory_bytes": memory, "disk_path": disk, "redis_url": redis, "chunk_tokens": chunk_tokens,
             "policy": policy}  # fmt: skip
    cache = _cache_settings(config, {name: value for name, value in asked.items() if value is not None})
    options = {"kv_cache_memory_bytes": _bytes(kv_memory), "served_model_name": model}
    options |= {"max_model_len": max_model_len} if max_model_len else {}
    server = ServerProcess(str(resolve_model(model).path), cache=cache, prefix_caching=prefix_caching, threads=threads,
                           vllm=options, port=port)  # fmt: skip
    console.print(f"starting vLLM; its log is {server.log}", highlight=False)
    before = signal.signal(signal.SIGTERM, _interrupt)  # what ends services, and `kill`, stops the server, too
    try:
        with server:
            _announce(server, cache, as_json)
            status = server.wait()
        raise typer.Exit(1 if status else 0)
    except KeyboardInterrupt:
        console.print("stopping", highlight=False)
        server.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _cache_settings(config: Path | None, asked: dict[str, Any]) -> dict[str, Any]:
    """Settings that are not the default, from the file and the options."""
    from workbench.config import CacheConfig

    settings = CacheConfig.from_yaml(config, **asked) if config else CacheConfig(**asked)
    return settings.model_dump(mode="json", exclude_unset=True)


def _bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from workbench.errors import InvalidInputError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise InvalidInputError(f"{text!r} is no size: {error.errors()[0]['msg']}") from None


def _without_password(value: Any) -> Any:
    """A setting as it may be printed: an address without its password."""
    from urllib.parse import urlsplit

    if not isinstance(value, str) or "://" not in value or not urlsplit(value).password:
        return value
    parts = urlsplit(value)
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")).geturl()


def _announce(server: Any, cache: dict[str, Any], as_json: bool) -> None:
    shown = {name: _without_password(value) for name, value in cache.items()}
    settings = {"url": server.url, "pid": os.getpid(), **server.settings(), "cache": shown}
    if as_json:
        print(json.dumps(settings), flush=True)
        return
    print_rows([{"setting": name, "value": str(value)} for name, value in settings.items()], as_json=False)
    console.print(f"ready at {server.url}/v1 (health: /health, counters: /metrics); Ctrl-C stops it", highlight=False)
