"""What growing a trained model saves.

`compare_growth`       the experiment on growing
`growth_subjects`      the models
`training_runs`        how a large model begins, and one training run
`growth_report`        its table
"""
