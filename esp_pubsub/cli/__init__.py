"""Programs: what can be done with the SDK from a shell."""
