"""Runs the model over one batch: plans, attention over pages, sampling."""
