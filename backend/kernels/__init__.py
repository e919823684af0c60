"""Kernels of products and attention in every precision."""
