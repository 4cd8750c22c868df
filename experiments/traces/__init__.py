"""Traces: readers, generators, import and export.

trace = load_trace("mooncake_conversation")        # a known trace, found on the data path
trace = load_trace("mine.jsonl.zst", skip_bad=True)  # Mooncake or Bailian lines, CSV, Parquet, oracleGeneral, ...
trace = zipf(objects=100_000, accesses=1_000_000)
"""

from experiments.traces.exports import to_oracle_general, write_trace
from experiments.traces.generators import agent, chat, rag, zipf
from experiments.traces.readers import (
    TRACE_FORMATS,
    data_folders,
    find_trace,
    known_traces,
    load_trace,
    trace_from_frame,
)
from experiments.traces.trace import Trace

__all__ = [
    "TRACE_FORMATS",
    "Trace",
    "agent",
    "chat",
    "data_folders",
    "find_trace",
    "known_traces",
    "load_trace",
    "rag",
    "to_oracle_general",
    "trace_from_frame",
    "write_trace",
    "zipf",
]
