"""The main job: real vLLM answers the same long prompts with and without reused KV."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.environment import describe_environment
from experiments.models import ModelSource, resolve_model
from experiments.runs import Run, new_run_folder, requests_frame
from experiments.serving import ARMS, Arm, Comparison, Progress
from experiments.workloads.long_document import long_document
from workbench.chunks import common_tokens

__all__ = ["compare", "demo_workload", "engine_room", "shared_tokens"]

_BLOCK_TOKENS = 128  # of vLLM's CPU backend
_HEADROOM_TOKENS = 512


def demo_workload(model: ModelSource, *, quick: bool = False, seed: int = 0) -> Any:
    """Real documents, a shared system prompt, two questions each; five groups that share nothing with one another."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model.path))
    if quick:
        return long_document(tokenizer, groups=5, documents_per_group=1, document_tokens=1000, questions=2,
                             max_tokens=8, seed=seed)  # fmt: skip
    return long_document(tokenizer, groups=5, documents_per_group=2, document_tokens=2000, questions=2,
                         max_tokens=16, seed=seed)  # fmt: skip


def compare(model: str | Path | ModelSource = "smollm2", workload: Any = None, *, arms: Sequence[str | Arm] = ARMS,
            runs: Path = Path("runs"), threads: int = 0, watch: Callable[[Progress], None] = lambda _: None,
            name: str = "compare") -> Run:  # fmt: skip
    """Run one workload through several arms on real vLLM and keep everything as a run.

    Args:
        model: What `resolve_model` takes.
        workload: Requests; the demo's long documents by default.
        arms: Names or `Arm`s; see `experiments.serving.ARMS`.
        runs: Folder of the run store.
        threads: Compute threads of each engine; all cores by default.
        watch: Called with `Progress`, for a progress bar.
        name: Part of the run's name.

    Returns:
        The run: `.requests` and `.events` are polars frames, `.environment` a dictionary.
    """
    source = model if isinstance(model, ModelSource) else resolve_model(model)
    workload = workload if workload is not None else demo_workload(source)
    folder = new_run_folder(name, runs)
    comparison = Comparison(str(source.path), workload, arms=arms, folder=folder, threads=threads,
                            vllm=engine_room(workload, source), watch=watch)  # fmt: skip
    rows = comparison.run()
    events = comparison.events()
    requests = requests_frame(folder.name, rows, events, shared_tokens(workload))
    return Run.save(folder, requests, events, {
        **describe_environment(),
        "model": {"name": source.name, "licence": source.licence, "sha256": source.sha256, "dtype": source.dtype,
                  "bytes_per_token": source.bytes_per_token},
        "workload": {"name": workload.name, "seed": workload.seed, "description": workload.description,
                     "requests": len(workload.requests),
                     "sources": [vars(source) for source in workload.sources]},
        "arms": {arm.name: comparison.settings[arm.name] for arm in comparison.arms},
        "skipped_arms": comparison.skipped,
        "method": "one request at a time; arms in rotating order; one single-process vLLM engine an arm; eager mode; "
                  "greedy; thread binding fixed and equal in all arms; a short warm-up request that shares no chunk",
    })  # fmt: skip


def engine_room(workload: Any, source: ModelSource) -> dict[str, int]:
    """Arguments of `vllm.LLM` that give room for every prompt of a workload: vLLM's own prefix cache never evicts then,
    and is a fair comparison."""
    longest = max(len(r.token_ids) + r.max_tokens for r in workload.requests)
    length = -(-(longest + _HEADROOM_TOKENS) // _BLOCK_TOKENS) * _BLOCK_TOKENS
    kv_tokens = sum(-(-len(r.token_ids) // _BLOCK_TOKENS) * _BLOCK_TOKENS for r in workload.requests) + 2 * length
    return {"max_model_len": length, "kv_cache_memory_bytes": kv_tokens * (source.bytes_per_token or 1 << 16)}


def shared_tokens(workload: Any) -> dict[str, int]:
    """Tokens that a request has in common with another document of its group, by request: the system prompt."""
    by_group: dict[Any, list[Any]] = {}
    for request in workload.requests:
        by_group.setdefault(request.group, []).append(request)
    return {r.request_id: _longest_shared(r, by_group[r.group]) for r in workload.requests}


def _longest_shared(request: Any, group: list[Any]) -> int:
    others = [other for other in group if other.document != request.document]
    return max((common_tokens(request.token_ids, other.token_ids) for other in others), default=0)
