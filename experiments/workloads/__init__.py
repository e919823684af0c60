"""Models and data of the experiments.

`workload`      a model, its data and its loss; training it
`subjects`      the models by name
`text`          text as bytes
`gpt`           byte-level GPT
`bert`          byte-level BERT
`vit`           vision transformer
`resnet`        ResNet, and the digits
`vgg`           VGG with BatchNorm
`families`      the suite of unseen models: many architectures, two of them held out
`unet`          a UNet that removes noise
`lstm`          a language model of LSTM layers
`large_models`  graphs of real sizes, with synthetic costs
"""
