"""A model family small enough to read in a minute, for tests of the runtime: arithmetic instead of a network."""
