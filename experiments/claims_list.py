"""The claims: published results about reusing KV, in the order of the table.

Figures marked [memory] in `source` were not looked up in the primary text. To add one, add a `Claim`; its measure may
be one of claims_runs.py or claims_measures.py, or a function of its own.
"""

from experiments import claims_measures as measures
from experiments import claims_runs as runs
from experiments.claims import Claim, Published
from experiments.cost import cost_model

__all__ = ["CLAIMS"]


def _reduction(model: str, hardware: str, *, prompt: int, hit: int, tier: str = "memory", output: int = 0) -> float:
    """Share by which TTFT, or with an output the whole request, falls with a hit."""
    costs = cost_model(model, hardware)
    answer = output * costs.decode_seconds(prompt)
    return 1 - (costs.ttft_seconds(prompt, hit, tier=tier) + answer) / (costs.ttft_seconds(prompt) + answer)


def _rounds(model: str, hardware: str, *, rounds: int = 10, growth: int = 512, output: int = 0) -> float:
    """The same over a conversation, each round's prompt longer by `growth`, all but the new part found."""
    costs = cost_model(model, hardware)
    cold = sum(costs.ttft_seconds(n * growth) for n in range(1, rounds + 1))
    warm = sum(costs.ttft_seconds(n * growth, (n - 1) * growth) for n in range(1, rounds + 1))
    answers = rounds * output * costs.decode_seconds(rounds * growth / 2)
    return 1 - (warm + answers) / (cold + answers)


def _batch(model: str, hardware: str, *, prefix: int, question: int, requests: int, output: int) -> float:
    """Throughput of a batch behind one prefix over the same without reuse; answers are decoded together."""
    costs = cost_model(model, hardware)
    answers = output * costs.decode_seconds(prefix + question, requests=requests)
    first, other = (costs.prefill_seconds(hit, prefix + question) for hit in (0, prefix))
    return (requests * first + answers) / (first + (requests - 1) * other + answers)


_CONCURRENCY = "one request at a time, a model of some million parameters; there many at once on a GPU"
_LOADS = "here a load is a copy in memory, below 1 % of the prefill it saves; on their hardware 5 to 15 % (modelled)"
_REPORTED = "reported by practitioners, primary source not found"
_ITSELF = "LMCache itself through its server and LMCacheMPConnector, on a CPU; without `_itself`: this engine"
_NO_TRACE = "its trace cannot be had here"

_EXACT = Published(1, 1, "share", "least", None)

CLAIMS = (
    Claim("long_document_ttft", f"{_REPORTED}: long-document RAG", "RAG over 10k-token documents",
          "LLaMA-7B, GPU not named", "TTFT falls by 68 %", Published(0.68, 0.68), runs.long_documents,
          "ttft_reduction", lambda: _reduction("llama-7b", "a100", prompt=10_000, hit=9_728), _LOADS),
    Claim("long_document_e2e", f"{_REPORTED}: long-document RAG", "RAG over 10k-token documents",
          "LLaMA-7B, GPU not named", "the whole request takes 73 % less", Published(0.73, 0.73), runs.long_documents,
          "e2e_reduction", lambda: _reduction("llama-7b", "a100", prompt=10_000, hit=9_728, output=16), _LOADS),
    Claim("long_document_reuse", f"{_REPORTED}: long-document QA", "repeated questions on long documents",
          "any", "over 85 % of the tokens are reused", Published(0.85, 1.0, bound="least"), runs.long_documents,
          "hit_rate", lambda: 9_728 / 10_000, "the rate is the workload's: question over document length"),
    Claim("chat_hit_rate", f"{_REPORTED}: multi-turn chat", "multi-turn chat", "any",
          "hit rate over 70 %", Published(0.7, 1.0, bound="least"), runs.chat_rounds, "hit_rate",
          lambda: sum(range(10)) / sum(range(1, 11)), "ten rounds; shorter than there"),
    Claim("same_prefix_throughput", f"{_REPORTED}: shared system prompts", "batches behind one prefix",
          "not named", "3 to 5 times the throughput", Published(3, 5, "times", neutral=1.0), runs.same_prefix,
          "throughput_times",
          lambda: _batch("llama-7b", "a100", prefix=2048, question=64, requests=32, output=64), _CONCURRENCY),
    Claim("chat_ttft_8b", f"{_REPORTED}: 10-turn chat", "10 rounds of about 512 tokens", "an 8B model",
          "TTFT falls by 50 to 70 %", Published(0.5, 0.7), runs.chat_rounds, "ttft_reduction",
          lambda: _rounds("llama-3-8b", "h100"), _LOADS),
    Claim("chat_throughput_8b", f"{_REPORTED}: 10-turn chat", "10 rounds of about 512 tokens",
          "an 8B model", "2 to 3 times the throughput", Published(2, 3, "times", neutral=1.0), runs.chat_rounds,
          "throughput_times", lambda: 1 / (1 - _rounds("llama-3-8b", "h100", output=8)), _CONCURRENCY),
    Claim("chunk_size_hit_rate", f"{_REPORTED}: chunk size 64 to 128", "not named", "not named",
          "twice the chunk: hit rate from 89 % to 83 %", Published(6, 6, "points"), runs.chat_rounds,
          "hit_points_lost", None, "chunks of 128 and 256, because vLLM's CPU blocks have 128 tokens"),
    Claim("chunk_size_throughput", f"{_REPORTED}: chunk size 64 to 128", "not named", "not named",
          "twice the chunk: throughput rises by 8 %", Published(0.08, 0.08), runs.chat_rounds,
          "throughput_change_coarse", None, "chunks of 128 and 256; here loading a chunk has next to no fixed cost"),
    Claim("redis_append_only", f"{_REPORTED}: Redis tuning", "writes to Redis", "not named",
          "without append-only file 12 % faster", Published(0.12, 0.12), measures.redis_append_only, "speedup_without",
          None, "the tier's own writes of 4 MiB records to a server on the same machine"),
    Claim("memory_lookup", f"{_REPORTED}: lookup latency", "lookup of a prompt", "host memory",
          "under 1 ms", Published(0, 1, "ms", "most", None), measures.lookups, "memory_ms", None,
          "a prompt of 40 chunks, keys computed"),
    Claim("redis_lookup", f"{_REPORTED}: lookup latency", "lookup of a prompt", "Redis, network not named",
          "2 to 5 ms", Published(2, 5, "ms", "range", None), measures.lookups, "redis_one_by_one_ms", None,
          "40 chunks asked one after the other, on loopback; one pipelined question takes a fraction of it"),
    Claim("fp8_memory", "vLLM documentation, quantised KV cache", "any", "any", "fp8 KV takes half the memory",
          Published(0.5, 0.5, "share", "range", 1.0), runs.fp8_pages, "kept_fraction", lambda: 0.5,
          "vLLM's own blocks in the same bytes, as it reports them"),
    Claim("short_prompt_threshold", f"{_REPORTED}: when not to cache", "prompts by length", "not named",
          "below about 512 tokens caching loses", Published(512, 512, "tokens", "range", None), runs.prompt_lengths,
          "memory_break_even_tokens", lambda: float(cost_model("llama-3-8b", "a100").break_even_tokens(
              "disk", new_tokens=64, overhead_s=0.02) or float("inf")),
          "here tails are stored and hits may end within a chunk; of whole chunks of 256 nothing shorter could hit"),
    Claim("lmcache_docs_ttft", "LMCache 0.5.6 documentation, Benchmarking", "long-doc-qa, 46 x 10k tokens",
          "Qwen3-8B, GPU not named", "mean TTFT 757 to 185 ms", Published(0.756, 0.756), runs.long_documents,
          "ttft_reduction", lambda: _reduction("qwen3-8b", "h100", prompt=10_000, hit=9_984), _LOADS),
    Claim("lmcache_docs_duration", "LMCache 0.5.6 documentation, Benchmarking", "long-doc-qa, 46 x 10k tokens",
          "Qwen3-8B, GPU not named", "the whole run 23.5 to 13.8 s", Published(0.41, 0.41), runs.long_documents,
          "duration_reduction", None, "two of three rounds repeat here; there the cold round is part of the run, too"),
    Claim("lmcache_readme_delay", "LMCache README", "multi-round QA and RAG", "not named", "3 to 10 times less delay",
          Published(3, 10, "times", neutral=1.0), runs.long_documents, "ttft_times",
          lambda: 1 / (1 - _reduction("llama-3-8b", "h100", prompt=8_192, hit=7_936)), _LOADS),
    Claim("lmcache_docs_ttft_itself", "LMCache 0.5.6 documentation, Benchmarking", "long-doc-qa, 46 x 10k tokens",
          "Qwen3-8B, GPU not named", "mean TTFT 757 to 185 ms", Published(0.756, 0.756), runs.lmcache_documents,
          "ttft_reduction", None, _ITSELF),
    Claim("lmcache_docs_duration_itself", "LMCache 0.5.6 documentation, Benchmarking", "long-doc-qa, 46 x 10k tokens",
          "Qwen3-8B, GPU not named", "the whole run 23.5 to 13.8 s", Published(0.41, 0.41), runs.lmcache_documents,
          "duration_reduction", None, _ITSELF),
    Claim("lmcache_readme_delay_itself", "LMCache README", "multi-round QA and RAG", "not named",
          "3 to 10 times less delay", Published(3, 10, "times", neutral=1.0), runs.lmcache_documents, "ttft_times",
          None, _ITSELF),
    Claim("gpustack_ttft", "GPUStack lab", "multi-turn, 20k tokens", "Qwen3-8B, RTX 4090", "TTFT falls by 58.8 %",
          Published(0.588, 0.588), runs.chat_rounds, "ttft_reduction",
          lambda: _rounds("qwen3-8b", "rtx4090", growth=2_000), _LOADS),
    Claim("gpustack_overhead", "GPUStack lab", "traffic that never repeats", "Qwen3-8B, RTX 4090",
          "throughput falls by 3 to 15 %", Published(-0.15, -0.03), runs.one_off_traffic, "throughput_change", None,
          "a smaller loss than published counts as not reproduced: the overhead is what a cache should not have"),
    Claim("oci_ttft", "Oracle OCI", "conversation, CPU tier", "Granite-3.3-8B, GPU not named", "TTFT falls by 50 %",
          Published(0.5, 0.5), runs.chat_rounds, "ttft_reduction", lambda: _rounds("granite-3.3-8b", "a100"), _LOADS),
    Claim("oci_throughput", "Oracle OCI", "conversation, CPU tier", "Granite-3.3-8B, GPU not named",
          "about twice the throughput", Published(2, 2, "times", neutral=1.0), runs.chat_rounds, "throughput_times",
          lambda: 1 / (1 - _rounds("granite-3.3-8b", "a100", output=8)), _CONCURRENCY),
    Claim("vllm_offload_ttft", "vLLM blog, KV offloading connector", "hits in host memory", "Llama-3.1-8B, H100",
          "TTFT 2 to 22 times lower", Published(2, 22, "times", neutral=1.0), runs.prompt_lengths,
          "ttft_times_longest", lambda: 1 / (1 - _reduction("llama-3-8b", "h100", prompt=16_384, hit=16_368)), _LOADS),
    Claim("vllm_offload_layout", "vLLM PR 27743", "hits in host memory", "Llama-3.1-8B, GPU not named",
          "cold 148 ms, hit 43 ms", Published(3.4, 3.4, "times", neutral=1.0), runs.prompt_lengths,
          "ttft_times_longest", None, _LOADS),
    Claim("nvidia_offload", "NVIDIA blog, CPU offload reuse", "hits in host memory", "Llama 70B, x86 host with H100",
          "TTFT up to 14 times lower", Published(14, 14, "times", neutral=1.0), runs.prompt_lengths,
          "ttft_times_longest", lambda: 1 / (1 - _reduction("llama-3-70b", "4xh100", prompt=16_384, hit=16_368)),
          _LOADS),
    Claim("lmcache_15_times", "LMCache report, arXiv 2510.09665", "multi-round QA, document analysis", "several GPUs",
          "up to 15 times the throughput", Published(15, 15, "times", neutral=1.0), runs.same_prefix,
          "throughput_times", lambda: _batch("llama-3-8b", "h100", prefix=10_000, question=64, requests=64, output=1),
          "an upper end: the best of their settings; here one setting"),
    Claim("coding_agent_reuse", "LMCache blog, 2026-05-12", "739 coding-agent sessions", "MiniMax-M2.5, 2 x MI300X",
          "93 to 97 % of the prefix is reused", Published(0.93, 0.97), measures.coding_agents, "hit_rate_unlimited",
          None, "the same public traces, 710 of them, replayed with room for everything", kind="simulated"),
    Claim("coding_agent_ttft", "LMCache blog, 2026-05-12", "32 users x 100k tokens", "MiniMax-M2.5, 2 x MI300X",
          "mean TTFT 3 times lower than with the device's own cache", Published(3, 3, "times", neutral=1.0),
          runs.overflowing_device, "ttft_times", None,
          "four conversations in turn, room for one or two of them in vLLM's own cache"),
    Claim("lru_thrash", "LMCache documentation, prefix-suffix-tuner", "a loop 5 % larger than the tier", "any",
          "under LRU every request of the second pass misses", Published(0, 0.001, "share", "most", None),
          measures.overflowing_loop, "lru_second_pass", None, "the same loop; MRU keeps most of it",
          kind="simulated"),
    Claim("cachegen_size", "CacheGen, arXiv 2310.07240", "KV as a bit stream", "Mistral-7B and larger",
          "3.5 to 4.3 times smaller than 8-bit KV", Published(3.5, 4.3, "times", neutral=1.0), measures.codec_quality,
          "cachegen_times_smaller_than_8_bit", None, "our coder after the paper, on SmolLM2's KV"),
    Claim("kivi_channels", "KIVI, arXiv 2402.02750", "4-bit keys", "Llama, Falcon, Mistral",
          "quantising keys by channel beats by token: less than half the error",
          Published(0, 0.5, "times", "most", 1.0), measures.codec_quality, "key_error_by_channel_over_by_token", None,
          "groups of 32, SmolLM2's keys"),
    Claim("kivi_2_bit", "KIVI, arXiv 2402.02750", "2-bit KV", "Llama, Falcon, Mistral", "almost the same quality",
          Published(0, 0.05, "share", "most", None), measures.codec_quality, "kivi_2_perplexity_change", None,
          "135 million parameters and no tokens kept in full precision: small models suffer more"),
    Claim("zipnn_saving", "ZipNN, arXiv 2411.05239", "lossless bf16", "weights and KV", "about 33 % smaller",
          Published(0.33, 0.33), measures.codec_quality, "lossless_saving", None, "our byte planes, on SmolLM2's KV"),
    Claim("cacheblend_ttft", "CacheBlend, arXiv 2405.16444", "RAG, reuse that is no prefix", "A40",
          "TTFT 2.2 to 3.3 times lower", Published(2.2, 3.3, "times", neutral=1.0),
          how="this engine reuses prefixes only: no selective recomputation"),
    Claim("simulator_table", "PyPI kvcache-simulator 0.1.3", "Mooncake traces", "simulation",
          "hit rates under LRU, FIFO and the optimum", _EXACT, measures.published_table("kvcache_simulator"),
          "share_exact", None, "share of the values that agree in all six digits", kind="simulated"),
    Claim("libcachesim_table", "libCacheSim 0.3.5", "Mooncake traces, 14 policies", "simulation", "miss ratios",
          _EXACT, measures.published_table("libcachesim"), "share_exact", None,
          "share of the values that agree in all six digits; sketch-based policies differ by design", kind="simulated"),
    Claim("llmtrafficlens_table", "llmtrafficlens README", "Mooncake conversation", "simulation",
          "hit rate at seven capacities", _EXACT, measures.published_table("llmtrafficlens"), "share_exact", None,
          "share of the values that agree in all digits", kind="simulated"),
    Claim("mooncake_figure_9", "Mooncake, FAST'25, figure 9", "Mooncake traces", "simulation",
          "hit rate by capacity", _EXACT, measures.published_table("mooncake_figure9"), "share_exact", None,
          "public block ids are of 512 tokens, the figure's were finer", kind="simulated"),
    Claim("mooncake_table_1", "Mooncake, arXiv 2407.00079, table 1", "their trace", "simulation",
          "LRU 0.51 with unlimited room", Published(0.51, 0.51), how=_NO_TRACE),
    Claim("cache_in_the_wild", "KVCache cache in the wild, ATC'25", "Alibaba's traces", "simulation",
          "62 % (A) and 54 % (B) could hit", Published(0.54, 0.62), how=_NO_TRACE),
    Claim("t_lru", "T-LRU, arXiv 2510.15152", "WildChat", "simulation", "P90 TTFT falls by 27.5 %",
          Published(0.275, 0.275), how=_NO_TRACE),
    Claim("marconi", "Marconi, MLSys'25", "LMSys, ShareGPT, SWE-bench", "hybrid models",
          "up to 34 times the hit rate [memory]", Published(34, 34, "times", neutral=1.0),
          how="its traces cannot be had here, and state-space hybrids are not served by this engine"),
)  # fmt: skip
