"""Programs: what can be done with the SDK from a shell. The command is `esp`, of the extra `cli`."""
