"""Derive the table of a recipe from one run of a model.

derive            `derive_recipe`: run the model and propose a recipe
growth_targets    a recipe whose target is a larger model: another configuration, or call of a builder
axis_tracer       run a model and trace its axes operator by operator
trace_records     records of a trace: values, parameter uses, norms, attentions, events
recorder          `Recorder`: everything that a trace collects
op_rules          the effect of each operator on axes
product_rules     the same for products, attention, norms, pools and losses
axis_unification  union-find over pieces of axes
interpret         read residual streams, heads and blocks off a trace
table_writer      name spaces and write the lines of the table
"""
