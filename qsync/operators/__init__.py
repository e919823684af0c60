"""Operators: all that qsync knows of each, declared once. No torch.

`declaration`  the record of one kind, and what its fields mean
`precision`    number formats, and the types that tensors have in them
`registry`     all kinds, by name and by torch call

One file a family:

`linear`       linear layers
`convolution`  convolutions of images, signals and volumes
`matmul`       products of two values
`attention`    attention and softmax
`embedding`    rows of a table
`recurrent`    LSTM, GRU and RNN
`norms`        norms
`activations`  activations and dropout
`arithmetic`   arithmetic by elements, and choosing among tensors
`reductions`   sums, means, pools
`views`        views, copies, changes of type
`losses`       losses
`structure`    what is no operator of torch
"""
