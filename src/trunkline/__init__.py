"""Trunkline: an inference server whose unit is the agent run."""

__version__ = "0.1.0"
