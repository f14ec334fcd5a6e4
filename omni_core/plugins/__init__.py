"""The plugin system: what plugins declare, how they are found, checked, matched and activated."""
