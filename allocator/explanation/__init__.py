"""Explanations of a plan.

`certificate`       derive a plan's step, memory and variance again, and list what does not hold
`lowering_reasons`  why each lowered operator is lowered
`shadow_prices`     the worth of more time or memory, and the next operators to raise or lower
`plan_warnings`     reasons to doubt a plan
`unsupported`       precisions that operators cannot have, and why
"""
