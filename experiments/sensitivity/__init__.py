"""Indicators against measured gradient errors.

`indicators`        the experiment
`indicator_report`  its tables and picture
"""
