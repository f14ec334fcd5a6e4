"""Decoders of speech codecs, and kernels for decoders that take few rows: what model families share."""
