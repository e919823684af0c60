"""Replay of levers: batch shares, accumulation, recomputation."""
