"""Mixed into the worker by tests: says how many rows there are, and does what vLLM does when it starts on a GPU."""

from __future__ import annotations


class RowCounter:
    """See vLLM's ``worker_extension_cls``."""

    def count_rows(self):
        """How many rows there are, and how many belong to a request."""
        rows = self.model_runner.model_state.rows
        return len(rows.codes), len(rows.requests)

    def warm_up(self):
        """vLLM's warm-up, which it runs on GPUs only."""
        from vllm.v1.worker.gpu.warmup import warmup_kernels

        warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
