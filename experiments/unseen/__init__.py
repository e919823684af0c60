"""Measure a suite of unseen models: speed beside peers, predicted steps, predicted memory.

`family_runs`  measurements of one family, in a fresh process
`report`       bars and tables
`fingerprints` tables of fingerprints, by processor
"""
