"""Advice from a request log."""

from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli._app import AsJson, app, console, print_rows


@app.command()
def advise(
    log: Annotated[str, typer.Argument(help="OpenAI-style JSONL, a vLLM log, a trace file, or a trace's name.")],
    model: Annotated[str, typer.Option(help="A preset, or a local config.json.")] = "llama-3-8b",
    hardware: Annotated[str, typer.Option(help="A preset; several as 4xh100.")] = "h100",
    size: Annotated[list[str] | None, typer.Option(help="A tier and its GiB, as memory=64; repeatable.")] = None,
    tokenizer: Annotated[str, typer.Option(help="A local Hugging Face tokenizer; estimated without.")] = "",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out and count them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a log's traffic should be cached, in which tier and how large: hit rates simulated, TTFT modelled.

    Examples: `kvworkbench advise requests.jsonl --hardware l4`,
    `kvworkbench advise mooncake_conversation --model llama-3-70b --hardware 4xh100 --size memory=512`
    """
    from experiments.advisor import DEFAULT_SIZES
    from experiments.advisor import advise as look

    sizes = _sizes(size) if size else DEFAULT_SIZES
    found = look(log, model=model, hardware=hardware, sizes=sizes, tokenize=_tokenize(tokenizer), skip_bad=skip_bad)
    if as_json:
        rows = [{"verdict": found.verdict(), "remarks": found.remarks(), "source": found.costs.source,
                 **vars(found.sharing), "tiers": found.table.to_dicts()}]  # fmt: skip
        print_rows(rows, True)
        return
    console.print(str(found), highlight=False, markup=False)
    print_rows(_readable(found.table), False)


def _readable(table: Any) -> list[dict[str, str]]:
    from experiments.units import bytes_text, seconds_text, share_text

    return [
        {"tier": row["tier"], "size": bytes_text(row["capacity_bytes"]) if row["capacity_bytes"] else "",
         "hit rate (simulated)": share_text(row["hit_rate"]),
         "mean TTFT (modelled)": seconds_text(row["ttft_mean_s"]), "P95": seconds_text(row["ttft_p95_s"]),
         "saved": share_text(row["saved"]), "$ per M prompt tokens": f"{row['dollars_per_million_tokens']:.4f}"}
        for row in table.iter_rows(named=True)
    ]  # fmt: skip


def _sizes(pairs: list[str]) -> dict[str, list[float]]:
    from workbench.errors import InvalidInputError

    sizes: dict[str, list[float]] = {}
    for pair in pairs:
        tier, _, gib = pair.partition("=")
        try:
            sizes.setdefault(tier, []).append(float(gib) * 2**30)
        except ValueError as error:
            raise InvalidInputError(f"--size {pair!r}: write a tier and its GiB, as memory=64") from error
    return sizes


def _tokenize(folder: str) -> Any:
    if not folder:
        return None
    from transformers import AutoTokenizer

    from workbench.errors import InvalidInputError

    if not Path(folder).exists():
        raise InvalidInputError(f"--tokenizer {folder!r} is no folder here")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
