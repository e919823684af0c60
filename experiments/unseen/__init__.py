"""The suite of unseen models: speed beside peers, predicted steps, predicted memory.

`family_runs`  what is measured of one family, in a fresh process
`report`       bars and tables
"""
