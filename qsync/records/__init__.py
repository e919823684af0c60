"""Records: what is measured, planned and predicted, as frozen dataclasses with JSON in and out. No torch.

`graph`           the operators of a captured model
`base`            the precision of the strong class, by torch.autocast's list
`cluster`         device classes, ranks and links
`compression`     how gradients travel between ranks, and the bytes of it
`datasheets`      peak rates of GPUs that need not be here
`variant`         how an operator runs: the keys of measured costs
`profiles`        measured costs of a device class; sensitivities of operators
`plans`           an assignment of precisions per device class
`levers`          what a plan changes beside precisions
`state_division`  which rank holds which part of an optimizer's state
`save_less`       operators that can save less for backward
`kernel_support`  which kernels a graph's operators lack on a device, and why
`plan_folder`     a folder with a plan and all it was made from
`json_files`      read and write JSON files
`record_json`     records as JSON, with every type and limit checked by msgspec
`identity_cache`  values computed once per record
"""
