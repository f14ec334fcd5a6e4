"""Mixed into the worker by tests: says how many rows there are."""

from __future__ import annotations


class RowCounter:
    """See vLLM's ``worker_extension_cls``."""

    def count_rows(self):
        """How many rows there are, and how many belong to a request."""
        rows = self.model_runner.model_state.rows
        return len(rows.codes), len(rows.requests)
