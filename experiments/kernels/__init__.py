"""Kernels against their bars and peers."""
