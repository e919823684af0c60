"""The command line, `qsync COMMAND`: one file a command.

`main`           the program: its commands, its version, its errors
`doctor`         what this machine has
`device_report`  what doctor measures
`doctor_tables`  what doctor prints
`demo`           the main job on this machine
`learn`          costs of operators, for what-if planning
`plan`           choose precisions
`cards`          `plan --cards`: what cards would make of a model, from data sheets
`pareto`         `plan --pareto`: plans for several step times
`expand`         grow a saved model
`explain`        why a plan lowers what it lowers
`replay`         what a step under a plan takes
`churn`          `replay --churn`: cards that leave and return
`report`         a page about a plan
`links`          bandwidth and latency from host to host
`diff`           what differs between two plans
`checkpoint`     what a checkpoint holds
`lighthouse`     where the cards of an elastic job meet; `release` one
`options`        options that commands share, and how their texts are read
`tables`         tables that commands print
`loading`        load plans and their bases; simulate profiles of devices that are not here
"""
