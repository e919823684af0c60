"""Tracing: a torch model becomes an operator graph.

`tracer`            capture a model through torch.compile's tracer
`segments`          read traced graphs into operators and values
`operator_table`    the kinds of operators
`module_names`      the names of operators, from the modules that call them
`traced_tensors`    how example tensors lie in memory, and which calls copy
`counted_calls`     what calls multiply, and what torch's derivatives of them save and need for a while
`inplace_calls`     calls that write to their operands
`replaced_forward`  replace a module's forward on the instance
"""
