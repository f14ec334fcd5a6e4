"""Module stages: a plain ``torch.nn.Module`` in a process of its own, behind a queue that batches."""
