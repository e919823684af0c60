"""Explanations of a plan.

`certificate`       derive a plan's step, memory and variance again, and list what does not hold
`plan_state`        the state that a plan describes, and what single changes of it would do
`lowering_reasons`  why each lowered operator is lowered
`shadow_prices`     the worth of more time or memory, and the next operators to raise or lower
`what_if`           changed inputs, ranked by the seconds that each wins
`plan_warnings`     reasons to doubt a plan
`unsupported`       report which operators of a plan cannot be lowered (reasons: `records/kernel_support`)
"""
