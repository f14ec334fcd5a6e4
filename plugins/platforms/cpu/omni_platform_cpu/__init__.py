"""CPU platform for Omni."""
