"""Where `vllm serve MODEL --omni` looks for Omni: a shim of omni-core."""
