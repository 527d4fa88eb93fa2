"""Errors of finding, converting and loading a model; each message is one sentence for the user."""

from __future__ import annotations


class ModelLoadError(RuntimeError):
    """The model cannot be found or read."""


class UnsupportedModel(ModelLoadError):
    """The model is readable but of a kind that this server does not serve."""
