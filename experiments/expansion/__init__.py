"""What growing a trained model saves.

`compare_growth`       the experiment on growing
`growth_subjects`      the models
`starts`               how a large model begins, and the precision plan of a grown one
`training_runs`        one training run
`growth_report`        its tables and picture
"""
