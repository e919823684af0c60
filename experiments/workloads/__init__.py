"""Models and data of the experiments.

`workload`      a model, its data and its loss; training it
`subjects`      the models by name
`text`          text as bytes
`gpt`           byte-level GPT
`bert`          byte-level BERT
`vit`           vision transformer
`resnet`        ResNet, and the digits
`vgg`           VGG with BatchNorm
`large_models`  graphs of real sizes, with synthetic costs
"""
