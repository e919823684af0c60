"""Tracing: a torch model becomes an operator graph.

`tracer`            capture a model through torch.compile's tracer
`segments`          read traced graphs into operators and values
`operator_table`    the kinds of operators
`inplace_calls`     calls that write to their operands
`replaced_forward`  replace a module's forward on the instance
"""
