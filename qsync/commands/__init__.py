"""The command line, `qsync COMMAND`: one file a command.

`main` the program: its commands, its version, its errors `doctor` the devices and kernels of this machine
`device_report` the measurements of doctor `doctor_tables` the tables of doctor `demo` the main job on this
machine `learn` costs of operators, for what-if planning `plan` choose precisions `cards` `plan --cards`:
predict training speed on cards, from data sheets `pareto` `plan --pareto`: plans for several step times
`expand` grow a saved model `explain` reasons behind a plan's precisions `replay` predict a step under a plan
`churn` `replay --churn`: cards that leave and return `report` a page about a plan `diff` differences between
two plans `checkpoint` the contents of a checkpoint `lighthouse` meeting point of an elastic job's cards;
`release` one `options` shared options and their parsing `tables` tables that commands print `loading` load
plans and their bases; simulate profiles of absent devices
"""
