"""Measure the savings of growing a trained model.

`compare_growth`       the experiment on growing
`growth_subjects`      the models
`training_runs`        starts of a large model, and one training run
`growth_report`        its table
"""
