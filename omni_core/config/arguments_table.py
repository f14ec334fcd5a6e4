"""Which of vLLM's arguments have a meaning for each kind of stage, and why the others do not.

The tables list what is allowed: an argument that a later vLLM adds is refused until somebody has decided about it.
A diffusion stage runs vLLM's engine, executors and workers with the core's own scheduler and model runner: there is
no key-value cache, tokenizer, sampler, graph capture or speculation, and the family loads its own weights. A talker
stage runs vLLM's own scheduler, runner, cache and graphs. A module stage is no engine, and has arguments of Omni's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

ATTENTION_BACKEND = "attention_backend"
"""Names one of Omni's attention backends instead of one of vLLM's; resolved apart from the engine arguments."""

DIFFUSION = frozenset({
    # the model, and what the HTTP API calls it
    "dtype", "served_model_name",
    # processes and devices
    "tensor_parallel_size", "distributed_executor_backend", "device_ids", "disable_custom_all_reduce",
    "distributed_timeout_seconds", "cpu_distributed_timeout_seconds",
    "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "worker_extension_cls", "shutdown_timeout",
    "fail_on_environ_validation",
    # memory: the share that must be free at start, and sleep mode's allocator
    "gpu_memory_utilization", "enable_sleep_mode", "enable_cumem_allocator",
    # how many requests take part in a step, and whether the next is enqueued meanwhile
    "max_num_seqs", "async_scheduling",
    # whether the model's blocks stay uncompiled
    "enforce_eager",
    # where images of requests may come from
    "allowed_local_media_path", "allowed_media_domains",
    # observing
    "profiler_config", "disable_log_stats", "enable_log_requests", "show_hidden_metrics_for_version",
    "logging_config", "log_level", "log_config_file",
})  # fmt: skip
"""Engine arguments that have a meaning for a diffusion stage."""

TALKER = (DIFFUSION - {"tensor_parallel_size", "disable_custom_all_reduce"}) | {
    # memory and lengths
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size", "max_model_len", "max_num_batched_tokens",
    # compilation and graphs
    "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level",
    # loading, and vLLM's attention
    "load_format", "attention_backend",
}  # fmt: skip
"""Engine arguments that have a meaning for a talker stage."""

MODULE: Mapping[str, tuple[Any, Any]] = {
    "device": (None, str | None),
    "dtype": ("float32", Literal["float32", "bfloat16", "float16"]),
    "max_batch": (64, int),
    "num_threads": (1, int),
}
"""Default and type of the arguments of a module stage: where and in what it computes, the most sessions of a step, and
threads of an operation on CPUs. Without ``device`` it is the platform's."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {"diffusion": {"max_num_seqs": 4}, "talker": {"max_num_seqs": 64}}
"""Defaults by kind of stage where vLLM's suit text models: a denoising forward grows with every request that shares it,
and a talker keeps what its requests have said."""

CHECKPOINT = frozenset({"model", "model_tag", "revision"})
"""What names the checkpoint; used up before there are stages."""

SERVER = frozenset({
    "config", "host", "port", "uds", "api_key", "root_path", "middleware",
    "uvicorn_log_level", "disable_uvicorn_access_log", "disable_access_log_for_endpoints", "log_error_stack",
    "allow_credentials", "allowed_origins", "allowed_methods", "allowed_headers",
    "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh",
    "enable_request_id_headers", "disable_fastapi_docs", "enable_offline_docs",
    "h11_max_incomplete_event_size", "h11_max_header_count",
})  # fmt: skip
"""vLLM's arguments of ``serve`` that are not engine arguments and that the server honours."""

_ONE = "only tensor parallelism is supported"
_ONE_HOST = "for several hosts use --distributed-executor-backend ray"
_ONE_SERVER = "Omni runs one server process"
_CORE = "omni-core decides it"

FIXED: Mapping[str, tuple[Any, str]] = {
    "enable_prefix_caching": (False, "there is no key-value cache"),
    "skip_tokenizer_init": (True, _CORE),
    "trust_remote_code": (False, "code in a checkpoint is never run; a family's code comes with its plugin"),
    "pipeline_parallel_size": (1, _ONE),
    "data_parallel_size": (1, _ONE),
    "prefill_context_parallel_size": (1, _ONE),
    "decode_context_parallel_size": (1, _ONE),
    "enable_expert_parallel": (False, _ONE),
    "nnodes": (1, _ONE_HOST),
    "api_server_count": (1, _ONE_SERVER),
    "headless": (False, _ONE_HOST),
    "grpc": (False, "Omni serves HTTP"),
    "enable_lora": (False, "adapters are not supported yet"),
    "cpu_offload_gb": (0, "offload is not supported yet"),
    "quantization": (None, "quantization is not supported yet"),
}
"""Arguments that have one possible value: asking for that is asking for what is done, any other is refused."""

TALKER_FIXED: Mapping[str, tuple[Any, str]] = {
    **FIXED,
    "enable_prefix_caching": (False, "what a frame's code stands for is not in its token alone"),
    "tensor_parallel_size": (1, "a talker runs on one device"),
}
"""The same for a talker stage."""

_REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("scheduler_cls", "worker_cls", "config_format", "tokenizer", "tokenizer_mode", "hf_config_path",
         "hf_overrides", "model_impl", "runner", "convert", "additional_config", "max_model_len",
         "max_num_batched_tokens", "scheduling_policy", "stream_interval", "model_weights"),
        _CORE,
    ),
    **dict.fromkeys(
        ("load_format", "model_loader_extra_config", "ignore_patterns", "safetensors_load_strategy",
         "pt_load_map_location", "use_tqdm_on_load", "max_parallel_loading_workers"),
        "the family loads its own weights",
    ),
    **dict.fromkeys(("master_addr", "master_port", "node_rank"), _ONE_HOST),
    "revision": "it is the checkpoint's; give it as --revision",
    "download_dir": "set HF_HUB_CACHE in the environment",
    "hf_token": "set HF_TOKEN in the environment",
    "seed": 'each request has a seed of its own: send "seed" with it',
    "code_revision": FIXED["trust_remote_code"][1],
    "max_num_queued_reqs": "use --max-queued-requests",
    "attention_config": "use --attention-backend",
    "grpc_port": FIXED["grpc"][1],
}  # fmt: skip

_PREFIXES = {
    "data_parallel_": _ONE,
    "dp_supervisor_": _ONE,
    "offload_": FIXED["cpu_offload_gb"][1],
    "cpu_offload_": FIXED["cpu_offload_gb"][1],
    "quantization_": FIXED["quantization"][1],
    "lora_": FIXED["enable_lora"][1],
    "max_lora": FIXED["enable_lora"][1],
    "safetensors_prefetch_": _REASONS["load_format"],
}


def fixed_for(kind: str) -> Mapping[str, tuple[Any, str]]:
    """What is fixed for a kind of stage."""
    return {"diffusion": FIXED, "talker": TALKER_FIXED}.get(kind, {})


def refusal(name: str, spelled: str, stages: str, value: Any = ..., kind: str = "diffusion") -> str | None:
    """Why an argument outside the allowed ones is refused, or ``None`` where ``value`` is what is done anyway.

    ``spelled`` is what the user wrote, ``stages`` what it was for, such as ``the diffusion stage 'diffusion'``.
    """
    if name in fixed_for(kind):
        fixed, reason = fixed_for(kind)[name]
        if value == fixed and (type(value) is type(fixed) or not isinstance(value, bool)):
            return None
        asked = "cannot be used for" if value is True else f"cannot be {value!r} for"
        return f"{spelled} {asked} {stages}: {reason}"
    prefixed = next((reason for prefix, reason in _PREFIXES.items() if name.startswith(prefix)), None)
    because = _REASONS.get(name) or prefixed
    if because is None:
        return f"{spelled} has no meaning for {stages}"
    return f"{spelled} cannot be set for {stages}: {because}"
