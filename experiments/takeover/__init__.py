"""What users do to a wrapped model: each case works, or is refused in one sentence."""
