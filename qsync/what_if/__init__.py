"""Predictions for devices that are not here.

`card_verdicts`  what cards would make of a model, from data sheets
`cost_learning`  fit a cost model to single operators that this device measures
"""
