"""Function-preserving expansion maps: how each grown tensor is made from one small tensor.

space_growth      index maps: the source of each coordinate of a grown space
tensor_maps       `TensorMap`: one grown tensor, axis by axis
tensor_roles      the tensors of a model, their lines of the recipe and the roles of their axes
depth             the source of each block of the grown model
zero_init_blocks  initialize new blocks so that they add nothing
model_map         `ModelMap`: the maps of all tensors of a model
describe          a model map as a table and as JSON
"""
