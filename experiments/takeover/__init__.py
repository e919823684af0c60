"""Test users' operations on a wrapped model: each works, or is refused in one sentence."""
