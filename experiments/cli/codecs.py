"""Codecs: which there are, what they cost in quality and time, and what was published about them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.cli._app import AsJson, Bar, app, console, print_rows

codecs = typer.Typer(no_args_is_help=True, help="Codecs: list them, measure them, compare with published claims.")
app.add_typer(codecs, name="codecs")

Table = Annotated[Path | None, typer.Option("--from", help="A table that `measure --out` wrote; the example one.")]


@codecs.command("list")
def list_codecs(as_json: AsJson = False) -> None:
    """Every codec, with what it is in a sentence, the most bits that a value can take, and its tolerance.

    Example: `kvworkbench codecs list`
    """
    from inspect import getmodule

    from workbench.codecs import codec_names, resolve_codec
    from workbench.layout import KVLayout

    layout, rows = KVLayout(num_layers=32, num_kv_heads=8, head_size=128), []
    for codec in map(resolve_codec, codec_names()):
        what = (getmodule(type(codec)).__doc__ or "").partition("\n")[0]
        promised = "none for a single value" if codec.tolerance is None else f"{codec.tolerance:.3g}"
        rows.append({"codec": codec.name, "what": what, "most bits a value": f"{codec.bits_per_value(layout):.2f}",
                     "tolerance, of the largest": promised})  # fmt: skip
    print_rows(rows, as_json)


@codecs.command()
def table(source: Table = None, as_json: AsJson = False) -> None:
    """The published claims about KV compression beside the measured codecs of one model.

    Example: `kvworkbench codecs table --from codecs.json`
    """
    from experiments.codec_table import EXAMPLE_TABLE, CodecTable
    from experiments.compression_claims import compression_claims

    measured = CodecTable.load(source or EXAMPLE_TABLE)
    rows = compression_claims(measured).to_dicts()
    if as_json:
        print_rows(rows, as_json)
        return
    console.print(measured.badge, highlight=False, markup=False)
    print_rows(
        [{key: row[key] for key in ("source", "says", "published", "measured", "verdict")} for row in rows], False
    )


@codecs.command()
def measure(
    names: Annotated[list[str] | None, typer.Argument(help="Codecs such as int8 'ecsq(step=0.3)'; all.")] = None,
    model: Annotated[str, typer.Option(help="smollm2, qwen2.5-coder, a folder or a hub name.")] = "smollm2",
    texts: Annotated[int, typer.Option(min=1, max=5, help="How many sample texts.")] = 5,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens stored of each, a multiple of 256.")] = 1024,
    scored_tokens: Annotated[int, typer.Option(min=2, help="Tokens scored after them.")] = 256,
    also: Annotated[
        str,
        typer.Option(
            help="Of tasks (greedy continuations, recall), calibrated (a KVTC-like codec), "
            "references (transformers' QuantizedCache, kvpress)."
        ),
    ] = "tasks",
    out: Annotated[Path | None, typer.Option(help="File for the table; rows are added if it is there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send a real model's prefixes through codecs and measure what they do to its next tokens.

    Example: `kvworkbench codecs measure int8 echo --texts 2 --out codecs.json`
    """
    from experiments.codec_table import COMPARED_CODECS, CodecTable, measure_codec_table
    from experiments.references import missing_references

    wanted = [name.strip() for name in also.split(",") if name.strip()]
    if "references" in wanted and (missing := missing_references()):
        wanted.remove("references")
        Console(stderr=True).print(f"the references are left out: {missing}", style="yellow", highlight=False)
    before = CodecTable.load(out) if out and out.exists() else None
    if before:
        before.require_same(model, texts, prefix_tokens, scored_tokens)
    sizes = {"texts": texts, "prefix_tokens": prefix_tokens, "scored_tokens": scored_tokens}
    with Bar() as bar:
        measured = measure_codec_table(model, names or COMPARED_CODECS, **sizes, also=wanted,
                                       watch=lambda _, *at: bar.count(*at))  # fmt: skip
    if out:
        (before.joined(measured) if before else measured).save(out)
    if not as_json:
        console.print(measured.badge, highlight=False, markup=False)
    rows = measured.frame().to_dicts()
    print_rows(rows if as_json else [_written(row) for row in rows], as_json)


@codecs.command()
def links(
    names: Annotated[list[str] | None, typer.Argument(help="Codecs; raw, lossless, int8, int4, ecsq.")] = None,
    model: Annotated[str, typer.Option(help="What `kvworkbench models` takes.")] = "smollm2",
    place: Annotated[str, typer.Option(help="redis (behind a link), memory or disk.")] = "redis",
    gbits: Annotated[str, typer.Option(help="Bandwidths of the link in Gbit/s, comma-separated.")] = "0.3,1,10",
    repeats: Annotated[int, typer.Option(min=1, help="Questions at each bandwidth.")] = 3,
    out: Annotated[Path | None, typer.Option(help="File for the measured requests.")] = None,
    as_json: AsJson = False,
) -> None:
    """Where compression pays under real vLLM: TTFT under each codec, its KV behind a link of a chosen bandwidth.

    Example: `kvworkbench codecs links raw int8 ecsq --gbits 1,10`
    """
    from experiments.codec_links import codec_links
    from experiments.plots.ttft_by_bandwidth import ttft_by_bandwidth_data

    speeds = [float(speed) for speed in gbits.split(",")]
    options = {"codecs": names} if names else {}
    progress = Console(stderr=True)
    measured = codec_links(model, place=place, gbits=speeds, repeats=repeats, **options,
                           watch=lambda what: progress.print(what, style="dim", highlight=False))  # fmt: skip
    if out:
        measured.save(out)
    if not as_json:
        console.print(measured.badge, highlight=False, markup=False)
    print_rows(ttft_by_bandwidth_data(measured.frame).to_dicts(), as_json)


def _written(row: dict[str, Any]) -> dict[str, str]:
    found = {
        "codec": row["codec"],
        "times smaller": f"{row['times_smaller']:.2f}",
        "KL": f"{row['kl']:.1e} ± {row['kl_interval']:.0e}",
        "log-likelihood change": f"{-row['nll_change']:+.4f} ± {row['nll_interval']:.4f}",
        "top token the same": f"{100 * row['top1_agreement']:.1f} %",
        "greedy tokens": _or_dash(row["greedy_tokens"], "{:.1f}"),
    }
    for name in ("needle", "key_value"):
        found[f"{name.replace('_', '-')} recall"] = _or_dash(row[f"{name}_recall"], "{:.0%}")
    speeds = [_or_dash(row[f"{way}_gb_per_s"], "{:.2f}") for way in ("encode", "decode")]
    return found | {"encode, decode GB/s": ", ".join(speeds)}


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
