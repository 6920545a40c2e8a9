"""Engines: one deterministic model, computed by several processes, published once (docs/explanation/engine.md)."""
