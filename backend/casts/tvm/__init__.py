"""The fused casts, as programs in TVM's script.

`rows` every program by name, and the casts over rows `columns` casts that reduce columns `activations` casts
with GELU or ReLU `attention` softmax of scores, and its gradient `expressions` arithmetic per element
`schedules` loops of a CPU, blocks of threads of a GPU `constants` numbers shared with the code that calls the
programs
"""
