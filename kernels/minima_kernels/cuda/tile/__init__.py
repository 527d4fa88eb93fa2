"""Kernels in TileLang; `lower.py` reads them in a process of its own, nothing imports them."""
