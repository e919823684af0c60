"""Compare indicators with measured gradient errors.

`indicators`        the experiment
`baselines`         indicators from the literature
`indicator_report`  its table
"""
