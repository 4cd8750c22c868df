"""Traces as files that other tools read."""

import json
from pathlib import Path

import numpy as np
import polars as pl

from experiments.traces.readers import ORACLE_RECORD
from experiments.traces.trace import Trace
from experiments.traces.tree import next_access
from workbench.errors import InvalidInputError

__all__ = ["to_oracle_general", "write_trace"]


def to_oracle_general(trace: Trace, path: str | Path) -> Path:
    """Write every block access as libCacheSim's oracleGeneral record, so that it can check our object semantics.

    Ids are written plus one, since libCacheSim takes 0 for no object; sizes are 1; time is in whole seconds.
    """
    records = np.empty(trace.accesses, ORACLE_RECORD)
    records["clock"] = np.repeat(np.maximum(trace.timestamps - trace.timestamps.min(), 0), trace.lengths)
    records["id"] = trace.ids.astype(np.uint64) + 1
    records["size"] = 1
    following = next_access(trace.ids, trace.distinct)
    records["next"] = np.where(np.isfinite(following), np.minimum(following, 2.0**62), -1).astype(np.int64)
    path = Path(path)
    records.tofile(path)
    return path


def write_trace(trace: Trace, path: str | Path) -> Path:
    """Write a trace as Parquet, CSV, JSON lines (seconds as Mooncake's milliseconds) or oracleGeneral, by its suffix.

    Raises:
        InvalidInputError: Another suffix, or blocks of different sizes, which none of these formats can hold.
    """
    path = Path(path)
    if trace.block_sizes is not None:
        raise InvalidInputError(f"{trace.name} has blocks of different sizes; no export format holds them")
    if path.suffix == ".parquet":
        trace.frame().write_parquet(path)
    elif path.suffix == ".csv":
        ids = pl.col("block_ids").cast(pl.List(pl.String)).list.join(" ")
        trace.frame().with_columns(ids).write_csv(path)
    elif path.suffix == ".jsonl":
        with path.open("w") as file:
            for row in trace.frame().iter_rows(named=True):
                file.write(json.dumps(_mooncake_row(row)) + "\n")
    elif path.suffix in (".oracle", ".bin"):
        to_oracle_general(trace, path)
    else:
        raise InvalidInputError(f"cannot write {path.name!r}: use .parquet, .csv, .jsonl, .oracle or .bin")
    return path


def _mooncake_row(row: dict) -> dict:
    return {
        "timestamp": round(row["timestamp"] * 1000),
        "input_length": row["input_tokens"],
        "output_length": row["output_tokens"],
        "hash_ids": row["block_ids"],
    }
